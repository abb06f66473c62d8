"""Rows of an atom: gathered, decoded and cut into ranges, equal to what is done to it whole."""

from __future__ import annotations

import pytest
import torch

from formats.family.layout import Atom
from formats.family.moves import Regroup, Rows, Tile, Unstack
from formats.family.ops import apply_all, shape_after
from formats.tensor import TensorInfo
from quant.fp8.form import CODES, SCALE
from quant.fp8.scheme import BLOCKS
from quant.opening import open_value
from quant.plain import Plain
from quant.stored import CHUNK_BYTES

REGROUP = Regroup(4, (32, 32, 96, 96), (0, 1, 2))


class Stored:
    """Tensors in memory, as a checkpoint gives them."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors

    def infos(self) -> dict[str, TensorInfo]:
        names = {torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32"}
        return {n: TensorInfo(n, names[t.dtype], tuple(t.shape)) for n, t in self.tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def load(self, _: str, data: torch.Tensor, index) -> torch.Tensor:
        return data[index]

    def release(self, _: int) -> None:
        pass


def atom_of(shape: tuple[int, ...], *ops, scale: str | None = None) -> Atom:
    form, parts = (BLOCKS, ("w", scale)) if scale else (Plain("BF16"), ("w",))
    return Atom("a", "a", "in_proj_qkv", shape_after(ops, shape), "BF16", form, "w", parts, ops)


@pytest.mark.parametrize(
    "ops",
    [
        (REGROUP,),
        (Rows(3, 700),),
        (Tile(8, 4, 32),),
        (REGROUP, Rows(5, 400)),
        (),
    ],
)
def test_rows_are_those_of_the_whole(ops):
    w = torch.randn(1024, 48).to(torch.bfloat16)
    value = open_value(Stored(w=w), atom_of(w.shape, *ops))
    whole = apply_all(ops, w)
    assert torch.equal(value.all(), whole)
    assert torch.equal(value.rows(7, 130), whole[7:130])
    assert value.data.data_ptr() >= w.data_ptr(), "nothing is copied before rows are asked for"


@pytest.mark.parametrize("ops", [(REGROUP,), (Rows(70, 700),), (Rows(70, 700), Tile(9, 10, 7)), ()])
def test_codes_are_decoded_by_the_scale_of_their_own_block(ops):
    codes = torch.randn(1024, 300).to(torch.float8_e4m3fn)
    scale = torch.rand(8, 3) + 0.5
    whole = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :300]
    stored = Stored(w=codes, s=scale)
    value = open_value(stored, atom_of(codes.shape, *ops, scale="s"))
    expected = apply_all(ops, whole)
    assert torch.equal(value.exact(0, len(expected)), expected)
    assert torch.equal(value.exact(33, 200), expected[33:200])
    rows = value.stored(33, 200)
    again = rows[CODES].float() * rows[SCALE].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(again, expected[33:200])


def test_a_stack_keeps_the_scales_of_each_part():
    codes = torch.randn(3, 256, 128).to(torch.float8_e4m3fn)
    scale = torch.rand(3, 2, 1) + 0.5
    value = open_value(Stored(w=codes, s=scale), atom_of(codes.shape, Unstack(2), scale="s"))
    assert torch.equal(value.shared_rows(SCALE, 0, 256), scale[2].repeat_interleave(128, 0))


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 16, CHUNK_BYTES])
@pytest.mark.parametrize("multiple", [1, 128])
def test_ranges_cover_all_rows_within_the_memory(chunk_bytes, multiple):
    w = torch.zeros(1000, 96, dtype=torch.bfloat16)
    value = open_value(Stored(w=w), atom_of(w.shape))
    ranges = list(value.chunks(multiple, held=2, chunk_bytes=chunk_bytes))
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == 1000
    assert all(start % multiple == 0 for start, _ in ranges)
    each = 96 * (value.cost().read + 2)
    most = max(stop - start for start, stop in ranges)
    assert most == min(multiple, 1000) or most * each <= chunk_bytes
