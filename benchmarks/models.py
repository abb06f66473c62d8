"""The released models by their sizes, and models of random weights with those sizes.

Nothing here is read from a checkpoint: a benchmark needs the shapes, the dtypes and numbers of the
right size. Each layer has storage of its own, as in a loaded model, so that none finds its weights
in a cache; the numbers of layers of one kind repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from formats.family.config import Config, read_config
from runtime.kernels.linear.packed import PackedWeight, packed_int4, packed_nvfp4
from runtime.kernels.linear.weight import BLOCK, Fp8Weight, Weight
from runtime.kernels.moe.layer import MoeWeights
from runtime.weights import Attention, Gdn, Layer, Mlp, Model

if TYPE_CHECKING:
    from torch import Tensor

COMMON = {
    "model_type": "qwen3_5_text", "head_dim": 256, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "vocab_size": 248320, "full_attention_interval": 4, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
        "mrope_interleaved": True, "mrope_section": [11, 11, 10],
    },
}  # fmt: skip
NAMES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_value_heads",
)
TINY = {
    "vocab_size": 60,
    "linear_num_key_heads": 1,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
SIZES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "0.8B": ((1024, 24, 8, 2, 16), {"intermediate_size": 3584, "tie_word_embeddings": True}),
    "9B": ((4096, 32, 16, 4, 32), {"intermediate_size": 12288}),
    "27B": ((5120, 64, 24, 4, 48), {"intermediate_size": 17408}),
    "35B-A3B": ((2048, 40, 16, 2, 32), {
        "model_type": "qwen3_5_moe_text", "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    }),
    "tiny": ((128, 4, 2, 1, 2), {"intermediate_size": 128, **TINY}),
    "tiny-moe": ((128, 4, 2, 1, 2), {
        "model_type": "qwen3_5_moe_text", "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, **TINY,
    }),
}  # fmt: skip


def config_of(name: str) -> Config:
    """Return the config of a released model, or of a tiny one."""
    sizes, more = SIZES[name]
    return read_config(COMMON | dict(zip(NAMES, sizes, strict=True)) | more)


CONFIGS: dict[str, Callable[[], Config]] = {name: partial(config_of, name) for name in SIZES}


def random_model(
    config: Config, device: str, dtype: torch.dtype, *, stored: str, layers: int | None = None
) -> Model:
    """Return a model without MTP head; FP8 linears quantise their inputs where it pays.

    stored  how its linears are: bf16 (the dtype), fp8, nvfp4 or int4

    layers  how many of its decoder layers, if not all
    """
    kinds = config.layer_types if layers is None else _some(config.layer_types, layers)
    make = Maker(device, dtype, stored=stored)
    patterns = {kind: make.layer(config, kind) for kind in dict.fromkeys(kinds)}
    embed = make.plain(config.sizes["V"], config.sizes["H"]).mul_(config.sizes["H"] ** 0.5)
    tied = bool(config.raw.get("tie_word_embeddings"))
    return Model(
        config=replace(config, layer_types=kinds),
        embed=embed,
        layers=tuple(_copied(patterns[kind]) for kind in kinds),
        norm=make.norm(config.sizes["H"]),
        head=embed if tied else make.plain(config.sizes["V"], config.sizes["H"]),
        mtp=None,
    )


def _some(kinds: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Return the last `count` kinds of the first period, which ends in attention."""
    end = kinds.index("full_attention") + 1
    return kinds[max(0, end - count) : end]


def _copied(value: Any) -> Any:
    """Return the same with every tensor copied."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if hasattr(value, "__dataclass_fields__"):
        return replace(
            value, **{field.name: _copied(getattr(value, field.name)) for field in fields(value)}
        )
    return value


class Maker:
    """Makes weights of variance 1 / K in float or FP8, norms near 1 and gates of usual size."""

    def __init__(self, device: str, dtype: torch.dtype, *, stored: str) -> None:
        self.device, self.dtype, self.stored = device, dtype, stored

    def normal(self, *shape: int) -> Tensor:
        """Return Gaussian numbers in the model dtype."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def plain(self, *shape: int) -> Tensor:
        """Return a weight in the model dtype."""
        return self.normal(*shape).mul_(shape[-1] ** -0.5)

    def norm(self, size: int) -> Tensor:
        """Return a zero-centred norm's weight."""
        return self.normal(size).mul_(0.1)

    def linear(self, *shape: int) -> Weight:
        """Return a weight, or a stack of them, stored as was asked for."""
        return self.MAKERS[self.stored](self, *shape)

    def nvfp4(self, *shape: int) -> PackedWeight:
        """Return a weight of E2M1 codes, whose mean square is 8.6."""
        *stack, n, k = shape
        codes = torch.randint(16, shape, dtype=torch.uint8, device=self.device)
        scale = torch.rand((*stack, n, k // 16), device=self.device).add_(0.5).mul_(32)
        row = torch.rand((*stack, n), device=self.device).add_(0.5) / (3.2 * 32 * k**0.5)
        return packed_nvfp4(codes, scale.to(torch.float8_e4m3fn), row)

    def int4(self, *shape: int) -> PackedWeight:
        """Return a weight of INT4 codes, usually in groups of 128, whose mean square is 18.7.

        They have no mean: with one, the tokens of a deep model become alike and choose the same
        experts.
        """
        *stack, n, k = shape
        group = BLOCK if k % BLOCK == 0 else 32
        codes = torch.randint(-7, 8, shape, dtype=torch.int8, device=self.device)
        scale = torch.rand((*stack, n, k // group), device=self.device).add_(0.5)
        return packed_int4(codes, (scale / (4.5 * k**0.5)).bfloat16())

    def fp8(self, *shape: int) -> Fp8Weight:
        """Return a weight in FP8 with scales of blocks."""
        *stack, n, k = shape
        codes = self.normal(*shape).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn)
        grid = (*stack, -(-n // BLOCK), -(-k // BLOCK))
        spread = torch.rand(grid, device=self.device).add_(0.5)
        return Fp8Weight(codes, spread / (100 * k**0.5), dynamic=True)

    MAKERS: ClassVar[dict[str, Callable[..., Weight]]] = {
        "bf16": plain, "fp8": fp8, "nvfp4": nvfp4, "int4": int4,
    }  # fmt: skip

    def layer(self, config: Config, kind: str) -> Layer:
        """Return one decoder layer."""
        s = config.sizes
        return Layer(
            input_norm=self.norm(s["H"]),
            mixer=self.attention(s) if kind == "full_attention" else self.gdn(s),
            post_norm=self.norm(s["H"]),
            feed_forward=self.experts(s)
            if config.moe
            else Mlp(self.linear(2 * s["I"], s["H"]), self.linear(s["H"], s["I"])),
        )

    def attention(self, s: dict[str, int]) -> Attention:
        """Return a gated attention."""
        rows = (2 * s["NH"] + 2 * s["NKV"]) * s["HD"]
        return Attention(
            qkv=self.linear(rows, s["H"]),
            q_norm=self.norm(s["HD"]),
            k_norm=self.norm(s["HD"]),
            out=self.linear(s["H"], s["NH"] * s["HD"]),
        )

    def gdn(self, s: dict[str, int]) -> Gdn:
        """Return a gated delta rule."""
        channels, values = 2 * s["NK"] * s["DK"] + s["NV"] * s["DV"], s["NV"] * s["DV"]
        return Gdn(
            qkvz=self.linear(channels + values, s["H"]),
            ba=self.plain(2 * s["NV"], s["H"]),
            conv=self.normal(channels, 1, s["K"]).mul_(0.5),
            dt_bias=self.norm(s["NV"]),
            A_log=self.norm(s["NV"]).float(),
            norm=self.norm(s["DV"]).add_(1),
            out=self.linear(s["H"], values),
        )

    def experts(self, s: dict[str, int]) -> MoeWeights:
        """Return a mixture of experts, the shared one being the last of the stack."""
        assert s["F"] == s["S"], "the shared expert is one of the stack"
        return MoeWeights(
            router=self.plain(s["E"] + 1, s["H"]),
            gate_up=self.linear(s["E"] + 1, 2 * s["F"], s["H"]),
            down=self.linear(s["E"] + 1, s["H"], s["F"]),
        )
