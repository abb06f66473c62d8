"""Weights of four bits as the kernels read them: NVFP4, and INT4 without zero points.

Chosen for: every product with weights of four bits: `PackedWeight` is what they are stored in.

    w[n, k] = code[n, k] * scale[n, k // group] * row[n]

A word of 32 bits holds eight codes where a few shifts and masks make pairs of bfloat16 of them. A
chunk of 256 columns is 32 words, and they hold eight planes of 32 columns: word e of plane p is one
code. Tensor cores take a plane at a time.

    NVFP4    column 16 (e // 2) + 2 p + e % 2     two words are a group: one scale for what a thread
                                                  decodes at once, multiplied exactly in bfloat16
    INT4     column 32 p + e                      a group of 32 is a plane: sums are scaled

Chunks come first, so that a program that has the same one of many rows reads on without a gap. The
order of columns within a chunk is free: it only has to be that of x (`spread`). NVFP4's scales
are kept with five bits of exponent, so that none is subnormal, in the byte whose sign E4M3 wastes.

Traps: code and scale of INT4 have 12 bits together, so their product is not a bfloat16. A group
whose scale is 0 has codes of 0.

Shape letters: E experts, N outputs, K inputs, C chunks of 256 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from runtime.kernels.cases import INT4, NVFP4

CHUNK = 256
WORDS = 32
PLANES = 8
NVFP4_GROUP = 16
INT4_GROUPS = (32, 64, 128)
_HALVES = 2
# where a code's sign, exponent and mantissa lie for the four pairs of a word: the second code of a
# pair has them 16 bits on, bit 31 being followed by bit 0
E2M1_BITS = ((15, 8, 7, 6), (11, 4, 3, 2), (5, 30, 29, 28), (9, 10, 1, 0))
INT4_BITS = tuple(tuple(4 * pair + bit for bit in (3, 2, 1, 0)) for pair in range(4))
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_ZERO = {NVFP4: 0, INT4: 8}
_BITS = {NVFP4: E2M1_BITS, INT4: INT4_BITS}
# a scale's byte is 8 * (exponent + 10) + mantissa
_EXPONENT = 10
_ROWS_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class PackedWeight:
    """A weight [N, K] of four bits, or a stack of them [E, N, K].

    words  [..., C, N, 32] int32
    scale  NVFP4: [..., C, N, 16] uint8; INT4: [..., C, N, 256 / group] float
    row    NVFP4: [..., N] float32; INT4: ones
    k      columns
    """

    words: Tensor
    scale: Tensor
    row: Tensor
    k: int

    def __getitem__(self, expert: int) -> PackedWeight:
        return PackedWeight(self.words[expert], self.scale[expert], self.row[expert], self.k)

    @property
    def shape(self) -> torch.Size:
        """Return the weight's shape."""
        return torch.Size((*self.row.shape, self.k))

    @property
    def chunks(self) -> int:
        """Return into how many chunks of columns it is cut."""
        return self.words.shape[-3]

    @property
    def group(self) -> int:
        """Return how many columns share a scale."""
        return CHUNK // self.scale.shape[-1]

    @property
    def is_nvfp4(self) -> bool:
        """Return whether it is NVFP4, else INT4."""
        return self.scale.dtype == torch.uint8

    @property
    def form(self) -> tuple[str, bool]:
        """Return how it is stored, and that x is never quantised."""
        return NVFP4 if self.is_nvfp4 else INT4, False


def packed_nvfp4(codes: Tensor, scale: Tensor, row: Tensor) -> PackedWeight:
    """Return a weight of E2M1 codes.

    codes  [..., N, K] uint8, below 16
    scale  [..., N, K / 16] float8_e4m3fn or float, none negative
    row    [..., N] float32
    """
    k, scale = codes.shape[-1], scale.float()
    kept = codes * (scale != 0).to(torch.uint8).repeat_interleave(NVFP4_GROUP, -1)
    mantissa, exponent = torch.frexp(scale)
    byte = (exponent - 1 + _EXPONENT) * 8 + ((2 * mantissa - 1) * 8).int()
    byte = torch.where(scale > 0, byte, 0).to(torch.uint8)
    row = torch.where((scale >= 0).all(-1), row.float(), torch.nan)  # such scales mean nothing
    byte = torch.nn.functional.pad(byte, (0, -k % CHUNK // NVFP4_GROUP))
    return PackedWeight(_words(kept, NVFP4), _by_chunk(byte, CHUNK // NVFP4_GROUP), row, k)


def packed_int4(codes: Tensor, scale: Tensor) -> PackedWeight:
    """Return a weight of INT4 codes.

    codes  [..., N, K] int8, -8 to 7
    scale  [..., N, K / group] float, a group being 32, 64 or 128 columns
    """
    k = codes.shape[-1]
    group = k // scale.shape[-1]
    assert group in INT4_GROUPS, f"groups of {group} columns are not packed"
    scale = torch.nn.functional.pad(scale, (0, -(-k // CHUNK) * CHUNK // group - scale.shape[-1]))
    row = torch.ones(codes.shape[:-1], dtype=torch.float32, device=codes.device)
    return PackedWeight(
        _words((codes + 8).to(torch.uint8), INT4), _by_chunk(scale, CHUNK // group), row, k
    )


def unpacked_reference(weight: PackedWeight) -> Tensor:
    """Return the weight in float32 [..., N, K], in plain torch."""
    form, scale = weight.form[0], weight.scale
    places, words = _BITS[form], weight.words.transpose(-3, -2).unflatten(-1, (-1, 2))
    scale = scale.transpose(-3, -2).flatten(-2)
    bits = torch.stack([_code(turned(words, h), p) for p in places for h in (0, 1)], -1)
    codes = bits.unflatten(-1, (4, _HALVES))  # [..., C, 16, 2, 4, 2]: e // 2, p // 4, p % 4, e % 2
    if form == NVFP4:
        values = _e2m1(codes).flatten(-5)
        byte = scale.float()
        exponent = torch.div(byte, 8, rounding_mode="floor")
        factor = (1 + (byte - 8 * exponent) / 8) * torch.exp2(exponent - _EXPONENT)
    else:
        values = (codes - 8).float().movedim(-4, -2).flatten(-5)
        factor = scale.float()
    values *= factor.repeat_interleave(weight.group, -1)
    return (values * weight.row[..., None])[..., : weight.k].contiguous()


def spread_reference(x_MK: Tensor, form: str) -> Tensor:
    """Return the rows [M, C * 256] with columns in the order of a weight's planes, then zeros."""
    x = torch.nn.functional.pad(x_MK, (0, -x_MK.shape[1] % CHUNK))
    if form == NVFP4:
        x = x.unflatten(1, (-1, WORDS // 2, PLANES, _HALVES)).transpose(2, 3).flatten(1)
    return x.contiguous()


def turned(words: Tensor, half: int) -> Tensor:
    """Return 32-bit words, or their halves exchanged: second codes where first ones were."""
    return words if half == 0 else words << 16 | (words >> 16 & 0xFFFF)


def _code(words: Tensor, places: tuple[int, ...]) -> Tensor:
    """Return the codes whose bits are at these places, the first one highest."""
    codes = torch.zeros_like(words)
    for i, place in enumerate(places):
        codes |= ((words >> place) & 1) << 3 - i
    return codes


def _e2m1(codes: Tensor) -> Tensor:
    values = torch.tensor(E2M1_VALUES, device=codes.device)[(codes & 7).long()]
    return torch.where(codes >= 8, -values, values)


@lru_cache
def _patterns(form: str, device: torch.device) -> Tensor:
    """Return what the first code of a pair is in a word, for each of the four pairs [4, 16]."""
    table = [
        [sum((code >> 3 - i & 1) << place for i, place in enumerate(pair)) for code in range(16)]
        for pair in _BITS[form]
    ]
    return torch.tensor(table, dtype=torch.int32, device=device)


def _words(codes: Tensor, form: str) -> Tensor:
    """Return the words [..., N, C * 32] of codes [..., N, K] below 16; a few rows at a time."""
    *lead, k = codes.shape
    rows = codes.reshape(-1, k)
    out = torch.empty((len(rows), -(-k // CHUNK) * WORDS), dtype=torch.int32, device=codes.device)
    step = max(1, _ROWS_AT_ONCE // k)
    for first in range(0, len(rows), step):
        out[first : first + step] = _row_words(rows[first : first + step], form)
    return _by_chunk(out.view(*lead, -1), WORDS)


def _by_chunk(x: Tensor, width: int) -> Tensor:
    """Return [..., C, N, width] of [..., N, C * width]."""
    by_chunk: Tensor = x.unflatten(-1, (-1, width)).transpose(-3, -2).contiguous()
    return by_chunk


def _row_words(codes_NK: Tensor, form: str) -> Tensor:
    padded = torch.nn.functional.pad(codes_NK, (0, -codes_NK.shape[1] % CHUNK), value=_ZERO[form])
    if form == NVFP4:  # [N, C, e // 2, p // 4, p % 4, e % 2]
        codes = padded.unflatten(1, (-1, WORDS // 2, 2, 4, _HALVES))
    else:
        codes = padded.unflatten(1, (-1, 2, 4, WORDS // 2, _HALVES)).movedim(4, 2)
    patterns = _patterns(form, codes.device)
    halves = sum(patterns[pair][codes[..., pair, :].long()] for pair in range(4))
    assert isinstance(halves, Tensor)
    return (halves[..., 0] | turned(halves[..., 1], 1)).flatten(1)
