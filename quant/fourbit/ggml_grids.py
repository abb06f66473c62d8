"""Where ggml's types keep a code for each column, and which values codes have.

    w ~ (code - zero) * step        step and zero of 16 or 32 columns, from scales of a super-block
    w ~ value of code * step        IQ4, whose values are unevenly spaced

A plane holds some bits of every code: chunks of `span` bytes, each byte with fields for columns
`span` apart. Steps and zeros are what the type's decoder makes of the least and the largest code.
Codes are shifted to lie around 0, as those of `quant.fourbit.rows` do.

Source: llama.cpp's ggml-quants.c at b11434, `dequantize_row_*`.

Shape letters: N rows, K columns, G groups of g columns in a row, B blocks of n columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from quant.ggml import codec, kinds
from quant.ggml.iq4_table import TABLE

if TYPE_CHECKING:
    from torch import Tensor

# Beside a constant, a step that no code makes felt; and one where that constant is 0 itself.
NOT_FELT, NOTHING = 2.0**-20, 2.0**-60


class Plane(NamedTuple):
    """Bits of codes: `width` from bit `low` on, in the bytes start to stop."""

    start: int
    stop: int
    width: int
    span: int
    low: int = 0


@dataclass(frozen=True, slots=True)
class Codes:
    """The codes of a type.

    group   columns that share a step
    bits    of a code
    planes  where they are
    signed  whether bytes hold them as signed numbers; of these the least is not used
    values  of IQ4, by code
    """

    group: int
    bits: int
    planes: tuple[Plane, ...]
    signed: bool = False
    values: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """Return how far codes are shifted."""
        return 1 << (self.bits - 1)

    @property
    def span(self) -> int:
        """Return the steps between the least and the largest value."""
        return self.values[-1] - self.values[0] if self.values else self.end - 1 - self.least

    @property
    def least(self) -> int:
        """Return the least code that is used, shifted."""
        return int(self.signed) - self.end


CODES = {
    "Q2_K": Codes(16, 2, (Plane(16, 80, 2, 32),)),
    "Q3_K": Codes(16, 3, (Plane(32, 96, 2, 32), Plane(0, 32, 1, 32, low=2))),
    "Q4_K": Codes(32, 4, (Plane(16, 144, 4, 32),)),
    "Q5_K": Codes(32, 5, (Plane(48, 176, 4, 32), Plane(16, 48, 1, 32, low=4))),
    "Q6_K": Codes(16, 6, (Plane(0, 128, 4, 64), Plane(128, 192, 2, 32, low=4))),
    "Q4_0": Codes(32, 4, (Plane(2, 18, 4, 16),)),
    "Q4_1": Codes(32, 4, (Plane(4, 20, 4, 16),)),
    "Q5_0": Codes(32, 5, (Plane(6, 22, 4, 16), Plane(2, 6, 1, 1, low=4))),
    "Q5_1": Codes(32, 5, (Plane(8, 24, 4, 16), Plane(4, 8, 1, 1, low=4))),
    "Q8_0": Codes(32, 8, (Plane(2, 34, 8, 1),), signed=True),
    "IQ4_NL": Codes(32, 4, (Plane(2, 18, 4, 16),), values=TABLE),
    "IQ4_XS": Codes(32, 4, (Plane(8, 136, 4, 16),), values=TABLE),
}


class Steps(NamedTuple):
    """The values that codes have: steps and shifted zeros, float32 [N, G].

    same  of which groups all codes mean the same
    """

    step: Tensor
    zero: Tensor
    same: Tensor


def steps_of(name: str, blocks_NB: Tensor) -> Steps:
    """Return the steps of a type's blocks, uint8 [N, bytes of a row]."""
    import torch

    codes, rows = CODES[name], len(blocks_NB)
    columns = kinds.columns(name, blocks_NB.shape[1])
    ends = []
    for code in (codes.least, codes.end - 1):
        whole = torch.full((rows, columns), code, dtype=torch.int8)
        values = codec.decode(name, put_codes(name, blocks_NB, whole), columns)
        ends.append(values.view(rows, -1, codes.group)[..., 0])
    least, largest = ends
    step = (largest - least) / codes.span
    same = step == 0
    still = torch.where(least == 0, NOTHING, least.abs() * NOT_FELT)
    step = torch.where(same, still, step)
    zero = torch.zeros_like(step) if codes.values else codes.least - least / step
    return Steps(step, zero, same)


def codes_of(name: str, units_NK: Tensor, zero_NK: Tensor) -> Tensor:
    """Return the shifted codes of units, int8 [N, K]."""
    import torch

    codes = CODES[name]
    if codes.values:
        found = torch.searchsorted(units_NK.new_tensor(codes.values), units_NK.contiguous())
        return (found - codes.end).to(torch.int8)
    return (units_NK + zero_NK).round().clamp(codes.least, codes.end - 1).to(torch.int8)


def put_codes(name: str, blocks_NB: Tensor, codes_NK: Tensor) -> Tensor:
    """Return the blocks with these codes, int8 and shifted, in place of theirs."""
    import torch

    size, nbytes = kinds.block(name)
    shifted = codes_NK.to(torch.int16).view(-1, size)
    codes = CODES[name]
    whole = (shifted & 0xFF) if codes.signed else shifted + codes.end
    out = blocks_NB.clone().view(-1, nbytes)
    for plane in codes.planes:
        fields = 8 // plane.width
        part = (whole >> plane.low) & ((1 << plane.width) - 1)
        part = part.view(len(whole), -1, fields, plane.span)
        shift = torch.arange(fields, dtype=torch.int16)[:, None] * plane.width
        packed = (part << shift).sum(2)
        out[:, plane.start : plane.stop] = packed.view(len(whole), -1).to(torch.uint8)
    return out.view(blocks_NB.shape)


def take_codes(name: str, blocks_NB: Tensor) -> Tensor:
    """Return the shifted codes of blocks, int8 [N, K]."""
    import torch

    size, nbytes = kinds.block(name)
    codes, stored = CODES[name], blocks_NB.reshape(-1, nbytes)
    whole = torch.zeros(len(stored), size, dtype=torch.int16)
    for plane in codes.planes:
        fields = 8 // plane.width
        shift = torch.arange(fields, dtype=torch.int16)[:, None] * plane.width
        packed = stored[:, plane.start : plane.stop].to(torch.int16)
        packed = packed.view(len(stored), -1, 1, plane.span)
        part = (packed >> shift) & ((1 << plane.width) - 1)
        whole |= part.reshape(whole.shape) << plane.low
    whole = whole if codes.signed else whole - codes.end
    return whole.to(torch.int8).view(len(blocks_NB), -1)


def gaps_of(name: str, codes_NK: Tensor) -> Tensor:
    """Return how many steps two values are apart where codes are, the wider side, [N, K]."""
    import torch

    codes = CODES[name]
    if not codes.values:
        return torch.ones(codes_NK.shape)
    apart = torch.tensor(codes.values, dtype=torch.float32).diff()
    wider = torch.cat([apart[:1], torch.maximum(apart[1:], apart[:-1]), apart[-1:]])
    return wider[codes_NK.long() + codes.end]
