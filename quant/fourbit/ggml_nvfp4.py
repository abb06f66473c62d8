"""NVFP4 as GGUF files have it: blocks, and beside `NAME.weight` the tensors that scale the weight.

    w ~ code * E4M3 scale of 16 columns * NAME.scale        NAME.scale  F32 [1], of experts [E]

These are the numbers of `quant.fourbit.nvfp4`, packed otherwise: codes and block scales of such a
weight are taken as they are, and its global scale multiplies. llama.cpp's converter writes
`NAME.input_scale` too, which is that of W4A4's inputs; files that llama-quantize made have neither.

Source: llama.cpp's conversion/base.py (`_nvfp4_pack`), and src/models/qwen35.cpp, which multiplies
what a matrix gives by its scale. Trap: an embedding that is looked up is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.family.moves import Tile
from formats.family.ops import apply_all
from formats.stored import StoredWeight
from formats.tensor import TensorInfo
from quant.errors import QuantError
from quant.fourbit.nvfp4 import NVFP4, Nvfp4
from quant.fourbit.parts import GLOBAL, PACKED, SCALE
from quant.ggml import kinds
from quant.ggml.scheme import BLOCKS, Ggml
from quant.part import Part, Shape

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from formats.family.ops import Op
    from quant.measure import Error
    from quant.scheme import Factor, Scheme

TYPE = "NVFP4"
GROUP, GROUPS, HALF = 16, 4, 8
INPUTS = "input_scale"
# Bytes from here on are not numbers, or negative ones.
NAN = 0x7F
# The ending of the tensor, and that of its name in the table.
ENDINGS = {GLOBAL: (".scale", "_scale"), INPUTS: (".input_scale", "_input_scale")}
WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class GgmlNvfp4(Ggml):
    """ggml's NVFP4.

    wholes  the scales that stand beside the blocks; without any, ggml's own encoder made them
    """

    type: str = TYPE
    looked_up: bool = False
    wholes: tuple[str, ...] = (GLOBAL,)

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        """Return the blocks and the scales of the whole: one, or one for each expert."""
        each, module = tuple(shape[:-2]) or (1,), name.removesuffix(WEIGHT)
        infos = ((key, TensorInfo(module + ENDINGS[key][0], "F32", each)) for key in self.wholes)
        blocks = super(GgmlNvfp4, self).parts(name, shape)
        return *blocks, *(Part(key, info, rows=None) for key, info in infos)

    def prepare(self, values: Iterator[Tensor]) -> Tensor | None:
        """Return the global scale of a fused matrix, as compressed-tensors has it."""
        return NVFP4.prepare(values) if self.wholes else None

    def encode(
        self,
        w_NK: Tensor,
        prepared: Tensor | None = None,
        importance: Tensor | None = None,
        out: Tensor | None = None,
        factor: Factor | None = None,
    ) -> dict[str, Tensor]:
        """Return blocks and scale: the numbers that `nvfp4a16` has of the weight."""
        if not self.wholes:
            return super(GgmlNvfp4, self).encode(w_NK, None, None, out)
        parts = NVFP4.encode(w_NK, prepared)
        return _joined(*_taken_apart(NVFP4, parts), ())

    def carries(self, form: Scheme, late: Sequence[Op]) -> bool:
        """Take the codes of any NVFP4, if columns are moved by whole groups."""
        return isinstance(form, Nvfp4 | GgmlNvfp4) and all(
            isinstance(op, Tile) and (op.axis == 0 or not op.width % GROUP) for op in late
        )

    def carry(
        self, form: Scheme, rows: Mapping[str, Tensor], late: Sequence[Op]
    ) -> dict[str, Tensor]:
        """Return the blocks of codes and scales as they are. QuantError for a negative scale."""
        return _joined(*_taken_apart(form, rows), late)

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the weight in float32."""
        values = super(GgmlNvfp4, self).decode(rows)
        return values * rows[GLOBAL].reshape(()).to(values.device) if self.wholes else values

    def compare(
        self,
        w_NK: Tensor,
        rows: Mapping[str, Tensor],
        importance: Tensor | None = None,
        *,
        weighed: bool = False,
    ) -> Error:
        """Return how far the blocks are from the weight, as for `nvfp4a16`."""
        if not self.wholes:
            return super(GgmlNvfp4, self).compare(w_NK, rows, importance, weighed=weighed)
        return NVFP4.compare(w_NK, _as_fourbit(rows))

    def judge(self, error: Error) -> list[str]:
        """Return the faults of groups, a gain and a bias."""
        return NVFP4.judge(error) if self.wholes else super(GgmlNvfp4, self).judge(error)

    def defects(self, rows: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
        """Return scales that are no unsigned numbers, and a wrong one of the whole."""
        bad = int((split(rows[BLOCKS])[1] >= NAN).sum())
        wholes = {key: rows[key].float() for key in self.wholes}
        counts = {BLOCKS: ("scales that are negative or NaN", bad)}
        for key, whole in wholes.items():
            wrong = int((~(whole.isfinite() & (whole > 0))).sum())
            counts[key] = (f"{key.strip('_')}s that are not finite and positive", wrong)
        return {key: defect for key, defect in counts.items() if defect[1]}


def recognise_nvfp4(name: str, infos: Mapping[str, TensorInfo]) -> StoredWeight:
    """Return the weight that a tensor of this name holds, with the scales that are there."""
    info = infos[name]
    each = tuple(info.shape[:-2]) or (1,)
    found = {key: infos.get(name + hub) for key, (_, hub) in ENDINGS.items()}
    scales = {key: i for key, i in found.items() if i and (i.dtype, i.shape) == ("F32", each)}
    return StoredWeight(
        name, info.shape, "F32", GgmlNvfp4(wholes=tuple(scales)), (info, *scales.values())
    )


def join(codes_NK: Tensor, scales_NG: Tensor) -> Tensor:
    """Return the blocks of codes and of E4M3 bytes, uint8 [N, K / 64 * 36]."""
    import torch

    rows = len(codes_NK)
    pairs = codes_NK.view(rows, -1, GROUPS, 2, HALF)
    packed = (pairs[..., 0, :] | (pairs[..., 1, :] << 4)).flatten(2)
    return torch.cat([scales_NG.reshape(rows, -1, GROUPS), packed], -1).flatten(1)


def split(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes [N, K] and the E4M3 bytes [N, K / 16] of blocks, both uint8."""
    import torch

    size = kinds.block(TYPE)[1]
    parts = blocks.reshape(-1, blocks.shape[-1] // size, size)
    packed = parts[..., GROUPS:].reshape(len(parts), -1, GROUPS, 1, HALF)
    codes = torch.cat([packed & 15, packed >> 4], -2)
    return codes.reshape(len(parts), -1), parts[..., :GROUPS].reshape(len(parts), -1)


def _taken_apart(form: Scheme, rows: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes, the E4M3 bytes and the scale over them that any form of NVFP4 has."""
    import torch

    from quant.fourbit.reference import unpack

    if isinstance(form, GgmlNvfp4):
        return *split(rows[BLOCKS]), rows[GLOBAL] if GLOBAL in rows else torch.ones(1)
    assert isinstance(form, Nvfp4), "asked before"
    one = torch.ones(1, dtype=torch.float8_e4m3fn)
    whole = form.steps({SCALE: one, GLOBAL: rows[GLOBAL]})
    return unpack(rows[PACKED]), rows[SCALE].view(torch.uint8), whole


def _joined(codes: Tensor, scales: Tensor, whole: Tensor, late: Sequence[Op]) -> dict[str, Tensor]:
    """Return the parts of rows whose columns are moved. QuantError for a negative scale."""
    if bool((scales >= NAN).any()):
        raise QuantError("a scale is negative or NaN,\n  expected an unsigned E4M3 number")
    moved = apply_all(tuple(late), codes)
    spread = apply_all(tuple(late), scales.repeat_interleave(GROUP, 1))
    return {BLOCKS: join(moved, spread[:, ::GROUP]), GLOBAL: whole.float().reshape(1)}


def _as_fourbit(rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parts that `nvfp4a16` has of these blocks."""
    import torch

    from quant.fourbit.reference import pack

    codes, scales = split(rows[BLOCKS])
    whole = 1 / rows[GLOBAL].reshape(1).float()
    return {PACKED: pack(codes), SCALE: scales.view(torch.float8_e4m3fn), GLOBAL: whole}
