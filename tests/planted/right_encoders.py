"""Right FP8 codes of other encoders: other scales, other roundings on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from quant.fp8.reference import block_amax, expand
from tests.planted.artifact import Artifact
from tests.planted.edit import Tensors, block_of, editing
from tests.planted.source_faults import original

Change = Callable[[Artifact], object]
Block = tuple[int, int]
Encode = Callable[[Tensor, Tensor, Block], tuple[Tensor, Tensor]]


def changes() -> Iterator[tuple[str, str, str, Change]]:
    """Yield kind, name, base and change of each."""
    for name, (bases, how) in ENCODERS.items():
        for base in bases:
            yield "encoder", name, base, partial(_encode_all, how=how)


def _encode_all(artifact: Artifact, how: Encode) -> None:
    """Encode every FP8 weight anew from the source's values."""
    artifact.strip()
    with editing(artifact) as tensors:
        for hub in _quantised(tensors):
            block = block_of(tensors.at(hub), tensors.scale(hub))
            w = original(tensors, hub)
            codes, scale = how(w, block_amax(w, block), block)
            tensors.at(hub).put(codes)
            tensors.scale(hub).put(scale)


def _quantised(tensors: Tensors) -> list[str]:
    """Return the hub names of all FP8 weights."""
    names = [name for name in tensors.names() if tensors.entry(name).info.dtype == "F8_E4M3"]
    return [name.removeprefix("model.").removeprefix("language_model.") for name in names]


def _codes(w: Tensor, scale: Tensor, block: Block) -> Tensor:
    ratio = w.float() / expand(scale.float(), block, w.shape)
    return ratio.clamp(-448, 448).to(torch.float8_e4m3fn)


def _float32(w: Tensor, amax: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    scale = amax.clamp(min=1e-12) / 448
    return _codes(w, scale, block), scale


def _rounded_after(w: Tensor, amax: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Round the scale to BF16 once the codes are made with the exact one."""
    codes, scale = _float32(w, amax, block)
    return codes, scale.to(torch.bfloat16)


def _rounded_before(w: Tensor, amax: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    scale = (amax.clamp(min=1e-12) / 448).to(torch.bfloat16)
    return _codes(w, scale, block), scale


def _in_bfloat16(w: Tensor, amax: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Divide in BF16, as tools do that never leave the model's type."""
    scale = (amax.to(torch.bfloat16) / 448).clamp(min=1e-12)
    ratio = w.to(torch.bfloat16) / expand(scale, block, w.shape)
    return ratio.clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _half_scales(w: Tensor, amax: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    scale = (amax / 448).to(torch.float16)
    return _codes(w, scale, block), scale


def _inverse(w: Tensor, amax: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Multiply by 448 / amax, as slime and DeepSeek's own tools do."""
    factor = 448 / amax.clamp(min=1e-4)
    ratio = w.float() * expand(factor, block, w.shape)
    return ratio.clamp(-448, 448).to(torch.float8_e4m3fn), 1 / factor


def _powers(w: Tensor, amax: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Take the next power of two above, in float32: scales for UE8M0."""
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return _codes(w, scale, block), scale


def _ties(
    w: Tensor, amax: Tensor, block: Block, less: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """Let ties go one way: to zero, or to the lesser number, as a search in a table does."""
    _, scale = _powers(w, amax, block)
    ratio = w.float() / expand(scale, block, w.shape)
    moved = ratio - less(ratio) * 2.0**-20
    return moved.clamp(-448, 448).to(torch.float8_e4m3fn), scale


BLOCKS = ("nano-fp8-block", "moe-fp8-block-hub", "wide-fp8-block")
ENCODERS: dict[str, tuple[tuple[str, ...], Encode]] = {
    "float32 scales": (("nano-fp8-block", "moe-fp8-block-hub", "wide-fp8-channel"), _float32),
    "scales rounded after": ((*BLOCKS, "wide-fp8-channel"), _rounded_after),
    "scales rounded before": ((*BLOCKS, "moe-fp8-channel"), _rounded_before),
    "division in BF16": (("nano-fp8-block", "wide-fp8-channel"), _in_bfloat16),
    "half scales": (("nano-fp8-block",), _half_scales),
    "inverse": (("moe-fp8-block", "nano-fp8-block-hub"), _inverse),
    "ties to zero": (("nano-fp8-block", "moe-fp8-block"), partial(_ties, less=lambda r: r)),
    "ties to the lesser": (("nano-fp8-block-hub",), partial(_ties, less=torch.abs)),
    "powers of two": (("wide-fp8-block",), _powers),
}
