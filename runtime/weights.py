"""The weights of a model, as the kernels take them.

Traps: sizes are those of config.json, never derived (head_dim is not hidden / heads). q_proj holds
for each head its query, then its gate.

Shape letters: H hidden size; V value heads of size v, C channels of q, k and v together, K taps of
the filters; nh heads and nkv key heads of size d; I inner size of a feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from formats.family.config import Config
from runtime.kernels.attention.fp8_cache import Fp8Cache
from runtime.kernels.cases import SEVERAL
from runtime.kernels.encode.rows import quantize_rows
from runtime.kernels.launch import capability
from runtime.kernels.linear.weight import Fp8Weight, Weight, adjacent, form_of, joined_rows
from runtime.kernels.moe.layer import MoeWeights


@dataclass(frozen=True)
class Gdn:
    """Gated delta rule. Rows of qkvz: q, k, v, z; of ba: b, which becomes beta, then a, the decay.

    qkvz [C + V*v, H], ba [2V, H], conv [C, 1, K], dt_bias and A_log [V], norm [v], out [H, V*v]

    On a GPU ba lies behind qkvz in memory if both are floats: they are one product of a prompt.
    """

    qkvz: Weight
    ba: Weight
    conv: Tensor
    dt_bias: Tensor
    A_log: Tensor
    norm: Tensor
    out: Weight

    def __post_init__(self) -> None:
        on_gpu = isinstance(self.ba, Tensor) and self.ba.is_cuda
        if not on_gpu or joined_rows(self.qkvz, self.ba) is not None:
            return
        for name, weight in zip(("qkvz", "ba"), adjacent(self.qkvz, self.ba), strict=True):
            object.__setattr__(self, name, weight)


@dataclass(frozen=True)
class Attention:
    """Gated attention. Rows of qkv: query and gate of each head in turn, all keys, all values.

    qkv [(2*nh + 2*nkv) * d, H], q_norm and k_norm [d], out [H, nh*d]
    cache  how keys and values are rounded in the pools; None: to the model dtype
    """

    qkv: Weight
    q_norm: Tensor
    k_norm: Tensor
    out: Weight
    cache: Fp8Cache | None = None


@dataclass(frozen=True)
class Mlp:
    """Dense feed-forward: gate_up [2I, H], gate rows first, and down [H, I]."""

    gate_up: Weight
    down: Weight


FeedForward = Mlp | MoeWeights
DRAFTED = 1 << 16
HAS_FP8 = (8, 9)  # the least compute capability of a GPU that computes with E4M3


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    input_norm: Tensor
    mixer: Gdn | Attention
    post_norm: Tensor
    feed_forward: FeedForward

    @cached_property
    def form(self) -> str:
        """Return how its large weights are stored, SEVERAL if not all alike or of experts."""
        mixer, weights = self.mixer, self.feed_forward
        if isinstance(weights, MoeWeights):
            return SEVERAL
        first = mixer.qkvz if isinstance(mixer, Gdn) else mixer.qkv
        forms = {form_of(w)[0] for w in (first, mixer.out, weights.gate_up, weights.down)}
        return forms.pop() if len(forms) == 1 else SEVERAL


@dataclass(frozen=True)
class Mtp:
    """Multi-token prediction head: fc [H, 2H] and one full-attention layer between norms [H]."""

    norm_embedding: Tensor
    norm_hidden: Tensor
    fc: Weight
    layer: Layer
    norm: Tensor


@dataclass(frozen=True)
class Model:
    """All weights. A tied head is `embed` itself."""

    config: Config
    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Weight
    mtp: Mtp | None

    @property
    def device(self) -> torch.device:
        """Return where the weights are."""
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the model dtype: that of the residual stream."""
        return self.embed.dtype

    def draft_head(self) -> Weight:
        """Return the rows of the head that drafts are chosen from: all, unless it is tied.

        Small models tie it. It is a third of the bytes of a step of 0.8B, and would be read again
        for each draft. Tokens are numbered by how common they are, so the first do for most drafts.
        A GPU that has FP8 gets a copy of them in it, half of the bytes: a draft may be wrong.
        """
        if self.head is not self.embed:
            return self.head
        rows_DH = self.embed[:DRAFTED]
        if capability(rows_DH.get_device()) < HAS_FP8:
            return rows_DH
        codes, scale = quantize_rows(rows_DH, rows_DH.shape[1])
        return Fp8Weight(codes, scale.contiguous())
