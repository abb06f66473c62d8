"""Operations: planned shape is real shape, inverses give bytes back, Regroup is a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from formats.family.arithmetic import AddOne
from formats.family.moves import Permute, Regroup, Rows, Unstack
from formats.family.ops import Op, apply_all, shape_after

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.float8_e4m3fn)
sizes = st.integers(1, 7)
shapes = st.lists(sizes, min_size=1, max_size=4).map(tuple)
seeds = st.integers(0, 2**16)


def noise(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same(one: torch.Tensor, two: torch.Tensor) -> bool:
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), two.contiguous().view(torch.uint8))


@st.composite
def op_and_shape(draw: st.DrawFn) -> tuple[Op, tuple[int, ...]]:
    """Any operation with a shape it applies to."""
    shape = draw(shapes)
    first = shape[0]
    heads, widths = draw(sizes), tuple(draw(st.lists(sizes, min_size=1, max_size=4)))
    keep = draw(st.permutations(range(len(widths))))[: draw(st.integers(1, len(widths)))]
    start = draw(st.integers(0, first - 1))
    choices: list[tuple[Op, tuple[int, ...]]] = [
        (Unstack(draw(st.integers(0, first - 1))), (*shape, 3)),
        (Rows(start, draw(st.integers(start + 1, first))), shape),
        (Regroup(heads, widths, tuple(keep)), (heads * sum(widths), *shape[1:])),
        (Permute(tuple(draw(st.permutations(range(len(shape)))))), shape),
        (AddOne(draw(st.sampled_from([-1, 1]))), shape),
    ]
    return draw(st.sampled_from(choices))


@given(op_and_shape(), seeds, st.sampled_from(DTYPES[:3]))
def test_the_planned_shape_is_the_real_one(chosen, seed, dtype):
    op, shape = chosen
    result = op.apply(noise(shape, seed, dtype))
    assert tuple(result.shape) == op.shape(shape)
    assert result.dtype == dtype


def test_operations_in_a_row_plan_what_they_do():
    ops = (Unstack(2), Rows(3, 7), Permute((1, 0)))
    stacked = noise((5, 8, 6), 0)
    result = apply_all(ops, stacked)
    assert torch.equal(result, stacked[2, 3:7].T)
    assert tuple(result.shape) == shape_after(ops, (5, 8, 6)) == (6, 4)
    assert apply_all((), stacked) is stacked
    assert shape_after((), (5, 8, 6)) == (5, 8, 6)


@pytest.mark.parametrize("op", [Unstack(3), Rows(2, 4)])
def test_a_selection_is_a_view_on_the_same_bytes(op):
    whole = noise((5, 6, 7), 0)
    view = op.apply(whole)
    inside = view.data_ptr() - whole.data_ptr()
    assert 0 <= inside < whole.numel() * 4
    assert view.is_contiguous()


@given(shapes, st.randoms(use_true_random=False), seeds, st.sampled_from(DTYPES))
def test_a_permutation_and_its_inverse_give_the_bytes_back(shape, random, seed, dtype):
    axes = list(range(len(shape)))
    random.shuffle(axes)
    op, tensor = Permute(tuple(axes)), noise(shape, seed, dtype)
    assert same(op.inverse().apply(op.apply(tensor)), tensor)
    assert same(op.apply(op.inverse().apply(tensor)), tensor)
    assert op.inverse().inverse() == op
    assert op.apply(tensor).is_contiguous()


@given(st.lists(st.integers(-64, 127), min_size=1, max_size=50), st.sampled_from(DTYPES[:3]))
def test_a_shifted_norm_comes_back_bit_for_bit(steps, dtype):
    """1 + w is exact in every type for multiples of 2^-7 in [-1/2, 1): BF16 has 8 bits."""
    w = (torch.tensor(steps) / 128).to(dtype)
    shifted = AddOne().apply(w)
    assert torch.equal(shifted.double(), w.double() + 1)
    assert same(AddOne().inverse().apply(shifted), w)
    assert AddOne().inverse() == AddOne(-1)


@given(st.integers(0x3F00, 0x4000))
def test_taking_one_from_a_stored_1_plus_w_rounds_nothing(bits):
    """Every BF16 in [1/2, 2] minus one is a BF16 (Sterbenz)."""
    stored = torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16)
    assert AddOne(-1).apply(stored).double() == stored.double() - 1


def regroup_by_hand(
    tensor: torch.Tensor, heads: int, widths: tuple[int, ...], keep: tuple[int, ...]
) -> torch.Tensor:
    rows = []
    for piece in keep:
        for head in range(heads):
            start = head * sum(widths) + sum(widths[:piece])
            rows += [tensor[start + i] for i in range(widths[piece])]
    return torch.stack(rows)


@given(
    heads=sizes,
    widths=st.lists(sizes, min_size=1, max_size=4),
    rest=st.lists(sizes, max_size=2),
    data=st.data(),
    dtype=st.sampled_from(DTYPES),
)
def test_regroup_equals_a_loop_over_heads(heads, widths, rest, data, dtype):
    keep = data.draw(st.lists(st.integers(0, len(widths) - 1), min_size=1, unique=True))
    tensor = noise((heads * sum(widths), *rest), data.draw(seeds), dtype)
    ours = Regroup(heads, tuple(widths), tuple(keep)).apply(tensor)
    by_hand = regroup_by_hand(
        tensor.view(torch.uint8) if rest else tensor.float(), heads, tuple(widths), tuple(keep)
    )
    assert torch.equal(ours.view(torch.uint8) if rest else ours.float(), by_hand)


def test_regroup_of_qwen3_next_puts_q_k_v_first_and_z_last():
    """Two key heads of width 1, two value heads each: q k vv zz | q k vv zz."""
    rows = torch.tensor([10, 20, 30, 31, 40, 41, 11, 21, 32, 33, 42, 43]).reshape(12, 1)
    qkv = Regroup(2, (1, 1, 2, 2), (0, 1, 2)).apply(rows)
    z = Regroup(2, (1, 1, 2, 2), (3,)).apply(rows)
    assert qkv.flatten().tolist() == [10, 11, 20, 21, 30, 31, 32, 33]
    assert z.flatten().tolist() == [40, 41, 42, 43]
