"""Weights in FP8 by the definition: with a scale for each 128x128 block, or for each row."""

from __future__ import annotations

from torch import Tensor

from quant.fp8.reference import dequantize, quantize

BLOCK = 128, 128


def quantize_block(w: Tensor, mode: str = "pow2") -> tuple[Tensor, Tensor]:
    return quantize(w, BLOCK, mode)


def quantize_channel(w: Tensor, mode: str = "pow2") -> tuple[Tensor, Tensor]:
    return quantize(w, (1, w.shape[-1]), mode)


def dequantize_block(codes: Tensor, scale: Tensor) -> Tensor:
    return dequantize(codes, scale, BLOCK)


def dequantize_channel(codes: Tensor, scale: Tensor) -> Tensor:
    return dequantize(codes, scale, (1, codes.shape[-1]))
