"""What every case of `benchmarks/kernels.py` is made of: sizes of a model, outputs and bounds.

References are computed in float64 from the same (rounded) inputs, and round only where the kernel's
docstring says that the model does. Pools hold random numbers, key pools NaN beyond each context;
what lies before a pool is where slot -1 would be. Inputs are views as the model makes them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

EPS = 1e-6


@dataclass(frozen=True)
class Bound:
    """How far an output may lie from its reference; with nothing set, not a bit."""

    relative_rms: float | None = None
    atol: float | None = None
    rtol: float = 0.0


BITS = Bound()
# one rounding to bfloat16: half a step of each element
ONCE = Bound(atol=1e-6, rtol=2**-8 * 1.01)
SEVERAL = Bound(0.005)
DEEP = Bound(0.01)


@dataclass(frozen=True)
class Part:
    """An output, what it should be, and how far apart they may lie."""

    name: str
    got: Tensor
    expected: Tensor
    bound: Bound


@dataclass(frozen=True)
class Case:
    """A kernel on inputs: `call` is timed, `check` calls it once on poisoned outputs.

    bytes  the fewest that must move: each input read once, each output written once
    """

    call: Callable[[], Any]
    check: Callable[[], list[Part]]
    bytes: float
    flops: float = 0.0


@dataclass(frozen=True)
class Setting:
    """The sizes of a model, and where and in which dtype its tensors are made."""

    hidden: int
    value_heads: int
    heads: int
    kv_heads: int
    inner: int
    key_heads: int = 16
    experts: int = 256
    top: int = 8
    d: int = 128
    head_dim: int = 256
    places: int = 8448
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16

    @property
    def widths(self) -> list[int]:
        """Return the channels of q, k and v in the convolution."""
        return [self.key_heads * self.d, self.key_heads * self.d, self.value_heads * self.d]

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return Gaussian numbers, in the model dtype unless another is named."""
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)

    def tensor(self, values: Sequence[int]) -> Tensor:
        """Return integers as int32."""
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def bounds(self, lengths: Sequence[int]) -> Tensor:
        """Return cu_seqlens."""
        return F.pad(self.tensor(lengths).cumsum(0), (1, 0)).int()

    def slots(self, number: int) -> Tensor:
        """Return so many slots of `number` + 3 in random order; of three or more one is padding."""
        slots = torch.randperm(number + 3)[:number]
        if number > 2:
            slots[number // 2] = -1
        return slots.int().to(self.device)


MODELS = {
    "0.8B": Setting(1024, 16, 8, 2, 3584),
    "27B": Setting(5120, 48, 24, 4, 17408),
    "35B-A3B": Setting(2048, 32, 16, 2, 512),
    "tiny": Setting(
        96, 4, 4, 2, 72, key_heads=2, experts=5, top=2, d=16, head_dim=32, places=160,
        device="cpu", dtype=torch.float32,
    ),
}  # fmt: skip


@contextmanager
def poison() -> Iterator[None]:
    """Let `torch.empty` give NaNs (the largest integers), so that an unwritten element is seen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(mode=False)


def poisoned(call: Callable[[], Any]) -> Any:
    """Return what `call` gives where every new tensor starts as NaN."""
    with poison():
        return call()


def size(*tensors: Tensor) -> int:
    """Return the bytes that the elements of these tensors take."""
    return sum(x.numel() * x.element_size() for x in tensors)
