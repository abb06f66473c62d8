"""A checkpoint's weights on a device, in a dtype: one layer at a time, or the whole model.

Any layout that `formats` recognises is read through its atoms, so fused or split experts, the hub's
or a text-only namespace and FP8 of either kind come out the same. Linears that share their input
are stored as one: gate and up, q with its gates, k and v, and the four projections of the delta
rule. `reader` reads one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.cache_scales import SCALED, cache_scales, cached_in_fp8
from formats.family.config import Config
from formats.family.names import PARTS
from formats.read_scale import read_scale
from formats.stored import by_cause, tell
from runtime.kernels.attention.fp8_cache import Fp8Cache
from runtime.kernels.attention.frequencies import check_rope
from runtime.kernels.linear.weight import Weight
from runtime.kernels.moe.layer import Experts, MoeWeights
from runtime.reader import Reader
from runtime.weights import Attention, FeedForward, Gdn, Layer, Mlp, Model, Mtp

Expert = tuple[tuple[str, ...], tuple[str, ...]]


def load_model(
    checkpoint: Checkpoint,
    device: torch.device | str,
    dtype: torch.dtype,
    *,
    keep_fp8: bool = False,
    dynamic_fp8: bool = False,
) -> Model:
    """Return the text model, with its MTP head if there is one.

    keep_fp8     FP8 weights stay codes and scales, those of four bits are packed
    dynamic_fp8  and inputs of more than 16 rows are quantised too

    FormatError if the checkpoint's tensors are not what its config says.
    """
    check(checkpoint)
    loader = Loader(checkpoint, torch.device(device), dtype, keep_fp8, dynamic_fp8, fp8_cache=True)
    embed, layout = loader.tensor("embed_tokens"), checkpoint.layout
    return Model(
        config=checkpoint.config,
        embed=embed,
        layers=tuple(loader.layer(i) for i in range(len(checkpoint.config.layer_types))),
        norm=loader.tensor("norm"),
        head=embed if layout.tied else loader.linear("lm_head"),
        mtp=loader.mtp() if has_mtp(checkpoint) else None,
    )


def check(checkpoint: Checkpoint) -> None:
    """Raise FormatError, naming the first, if it has problems, or a rope that is not computed.

    The vision tower is not run, and an MTP head that is not whole is not loaded.
    """
    causes = by_cause(checkpoint.layout.problems_without(PARTS.values()))
    if causes:
        more = f"\n  and   {len(causes) - 1} other kinds of problems" if causes[1:] else ""
        raise FormatError(f"{tell(causes[0])}{more}")
    check_rope(checkpoint.config.rope)


def has_mtp(checkpoint: Checkpoint) -> bool:
    """Tell whether there is an MTP head, and whole."""
    broken = any(problem.part == "mtp" for problem in checkpoint.layout.problems)
    return bool(checkpoint.layout.form.mtp_layers) and not broken


@dataclass(frozen=True)
class Loader(Reader):
    """Puts layers together from what it reads.

    lazy_experts  experts are read when they are asked for, and not kept (without a GPU only)
    fp8_cache     keys and values are rounded as in an FP8 cache, if the config asks for one
    """

    lazy_experts: bool = False
    fp8_cache: bool = False

    @property
    def config(self) -> Config:
        """Return the checkpoint's config."""
        return self.checkpoint.config

    def layer(self, i: int) -> Layer:
        """Return decoder layer i."""
        return self._layer(f"layers.{i}.", self.config.layer_types[i])

    def mtp(self) -> Mtp:
        """Return the multi-token prediction head: its first layer, which is the only one."""
        return Mtp(
            norm_embedding=self.tensor("mtp.pre_fc_norm_embedding"),
            norm_hidden=self.tensor("mtp.pre_fc_norm_hidden"),
            fc=self.linear("mtp.fc"),
            layer=self._layer("mtp.layers.0.", "full_attention"),
            norm=self.tensor("mtp.norm"),
        )

    def _layer(self, prefix: str, kind: str) -> Layer:
        return Layer(
            input_norm=self.tensor(prefix + "input_layernorm"),
            mixer=self._gdn(prefix + "linear_attn.")
            if kind == "linear_attention"
            else self._attention(prefix + "self_attn."),
            post_norm=self.tensor(prefix + "post_attention_layernorm"),
            feed_forward=self._moe(prefix + "mlp.") if self.config.moe else self._mlp(prefix),
        )

    def _gdn(self, prefix: str) -> Gdn:
        return Gdn(
            qkvz=self.linear(prefix + "in_proj_qkv", prefix + "in_proj_z"),
            ba=self.linear(prefix + "in_proj_b", prefix + "in_proj_a"),
            conv=self.tensor(prefix + "conv1d"),
            dt_bias=self.tensor(prefix + "dt_bias"),
            A_log=self.tensor(prefix + "A_log"),
            norm=self.tensor(prefix + "norm"),
            out=self.linear(prefix + "out_proj"),
        )

    def _attention(self, prefix: str) -> Attention:
        return Attention(
            qkv=self.linear(*(prefix + part for part in ("q_proj", "k_proj", "v_proj"))),
            q_norm=self.tensor(prefix + "q_norm"),
            k_norm=self.tensor(prefix + "k_norm"),
            out=self.linear(prefix + "o_proj"),
            cache=self._cache(prefix.removesuffix(".")),
        )

    def _cache(self, attention: str) -> Fp8Cache | None:
        """Return the scales of a decoder layer's cache; engines run one that is missing at 1.0."""
        if not self.fp8_cache or attention not in cached_in_fp8(self.config):
            return None
        stored = cache_scales(self.checkpoint.layout.activation_scales).get(attention, {})
        return Fp8Cache(*(self._scale(stored.get(what)) for what in SCALED))

    def _scale(self, stored: str | None) -> Tensor:
        scale = torch.ones(1) if stored is None else read_scale(self.checkpoint, stored)
        return scale.to(self.device, torch.float32).reshape(())

    def _mlp(self, prefix: str) -> FeedForward:
        up, down = _expert(prefix + "mlp.")
        return Mlp(self.linear(*up), self.linear(*down))

    def _moe(self, prefix: str) -> FeedForward:
        """Return a mixture of experts; a shared expert of their form and size joins the stack."""
        experts = [_expert(f"{prefix}experts.{e}.") for e in range(self.config.sizes["E"])]
        shared = _expert(prefix + "shared_expert.")
        router, gate = prefix + "gate", prefix + "shared_expert_gate"
        if self._absorbs(experts[0], shared):
            ups, downs = zip(*experts, shared, strict=True)
            return MoeWeights(self.tensor(router, gate), self._experts(ups), self._experts(downs))
        ups, downs = zip(*experts, strict=True)
        return MoeWeights(
            self.tensor(router),
            self._experts(ups),
            self._experts(downs),
            self.tensor(gate),
            self.linear(*shared[0]),
            self.linear(*shared[1]),
        )

    def _absorbs(self, expert: Expert, shared: Expert) -> bool:
        sizes = self.config.sizes
        alike = all(self.edge(a) == self.edge(b) for a, b in zip(expert, shared, strict=True))
        return sizes["F"] == sizes["S"] and alike

    def _experts(self, groups: Sequence[tuple[str, ...]]) -> Experts:
        """Return one weight for each group of names: stacked, or read when asked for."""
        return _LazyExperts(self, groups) if self.lazy_experts else self.stack(groups)


@dataclass(frozen=True)
class _LazyExperts:
    """Experts that are read from the checkpoint each time one is asked for."""

    loader: Loader
    groups: Sequence[tuple[str, ...]]

    def __getitem__(self, expert: int) -> Weight:
        return self.loader.linear(*self.groups[expert])


def _expert(prefix: str) -> Expert:
    """Return the names of a gated feed-forward: its gate and up, which are stored as one; down."""
    return (prefix + "gate_proj", prefix + "up_proj"), (prefix + "down_proj",)
