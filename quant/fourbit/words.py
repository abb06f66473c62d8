"""Codes packed in words of 32 bits: eight of four bits, or four of eight.

    along columns   element i of a row stands at bits b (i % n) of word i // n
    along rows      the same down a column: word [r, c] holds rows n r to n r + n - 1
    AWQ             along rows, and the nibbles of a word in the order 0 4 1 5 2 6 3 7

A code is stored as what it is above the least one, and is returned with its sign.

Source: compressed-tensors at 0.20, gptqmodel at 7.7, AutoAWQ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WORD = 32
# The nibble that holds each of eight rows.
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def in_a_word(bits: int) -> int:
    """Return how many codes a word holds."""
    return WORD // bits


def pack_columns(codes_NK: Tensor, bits: int) -> Tensor:
    """Return the words of codes, int32 [N, K / n]."""
    import torch

    from quant.fourbit import cpu

    if bits == 4:
        return cpu.pack_int4(codes_NK)
    return (codes_NK.contiguous().view(torch.uint8) ^ 0x80).view(torch.int32)


def unpack_columns(words: Tensor, bits: int) -> Tensor:
    """Return the codes of words [N, K / n], int8 [N, K]."""
    import torch

    from quant.fourbit import cpu

    if bits == 4:
        return cpu.unpack_int4(words)
    return (words.cpu().contiguous().view(torch.uint8) ^ 0x80).view(torch.int8)


def pack_rows(codes_NG: Tensor, bits: int = 4) -> Tensor:
    """Return the words of codes, int32 [N / n, G]."""
    import torch

    end, count = 1 << (bits - 1), in_a_word(bits)
    apart = (codes_NG.long() + end).reshape(-1, count, codes_NG.shape[1])
    return (apart << (bits * torch.arange(count))[:, None]).sum(1).to(torch.int32)


def unpack_rows(words: Tensor, bits: int = 4, places: tuple[int, ...] | None = None) -> Tensor:
    """Return the codes of words [R, G], int8 [n R, G].

    places  where in a word each of its rows stands; None: in their order
    """
    import torch

    end, shifts = 1 << (bits - 1), torch.tensor(places or range(in_a_word(bits))) * bits
    apart = words[:, None] >> shifts.to(torch.int32)[:, None]
    return ((apart & (2 * end - 1)) - end).to(torch.int8).flatten(0, 1)


def unpack_awq(words: Tensor) -> Tensor:
    """Return the codes of AWQ's words [R, G], int8 [8 R, G]."""
    return unpack_rows(words, places=AWQ_PLACES)


def one_more(words: Tensor, bits: int) -> Tensor:
    """Return words with one added to each code, carried over as gptqmodel does.

    Its words were made by `one_less`, with the borrow, so that a zero comes back too.
    """
    return _moved(words, bits, 1)


def one_less(words: Tensor, bits: int) -> Tensor:
    """Return words with one taken from each code."""
    return _moved(words, bits, -1)


def _moved(words: Tensor, bits: int, by: int) -> Tensor:
    import torch

    ones = sum(1 << shift for shift in range(0, WORD, bits))
    return (words.long() + by * ones).to(torch.int32)
