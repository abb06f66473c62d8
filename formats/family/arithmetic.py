"""Operations that compute: what GGUF and MLX store in place of a number of the hub's.

    norms   1 + w                where the hub's are zero-centred
    A_log   ssm_a = -exp(A_log)  in GGUF

Trap: several A_log have one float32 rate, so the way back takes the one that a writer most likely
had, see `NegLog`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from formats.family.ops import Shape


@dataclass(frozen=True, slots=True)
class AddOne:
    """Shift a zero-centred norm: w -> w + sign. MLX and GGUF store 1 + w."""

    sign: int = 1

    def shape(self, shape: Shape) -> Shape:
        """Keep the shape."""
        return shape

    def apply(self, tensor: Tensor) -> Tensor:
        """Add in float32, return in the tensor's type (exact for a stored 1 + w near 1)."""
        return (tensor.float() + self.sign).to(tensor.dtype)

    def inverse(self) -> AddOne:
        """Shift the other way."""
        return AddOne(-self.sign)


@dataclass(frozen=True, slots=True)
class Float32:
    """Widen to float32, before arithmetic that the stored type would round."""

    def shape(self, shape: Shape) -> Shape:
        """Keep the shape."""
        return shape

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the same values in float32."""
        return tensor.float()

    def inverse(self) -> Float32:
        """Return float32 again: what was widened is narrowed by whoever knows the type."""
        return self


@dataclass(frozen=True, slots=True)
class NegExp:
    """The decay rate from its logarithm: A_log -> -exp(A_log), which GGUF stores as ssm_a."""

    def shape(self, shape: Shape) -> Shape:
        """Keep the shape."""
        return shape

    def apply(self, tensor: Tensor) -> Tensor:
        """Return -exp(x) in float32."""
        return -tensor.float().exp()

    def inverse(self) -> NegLog:
        """Return the logarithm."""
        return NegLog()


@dataclass(frozen=True, slots=True)
class NegLog:
    """The logarithm back from the rate: a -> log(-a).

    Several logarithms may have one float32 rate; a bfloat16 among them is taken to be the original.
    """

    def shape(self, shape: Shape) -> Shape:
        """Keep the shape."""
        return shape

    def apply(self, tensor: Tensor) -> Tensor:
        """Return float32: log(-a), at every rate as short as it can be without changing it."""
        import torch

        log = (-tensor.double()).log()
        short = log.to(torch.bfloat16).float()
        return torch.where(NegExp().apply(short) == tensor, short, log.float())

    def inverse(self) -> NegExp:
        """Return the rate."""
        return NegExp()
