from __future__ import annotations

import numpy as np
import pytest
import torch

from quant.errors import QuantError
from quant.ggml import codec, kinds
from quant.importance import FLOOR, NOTHING, importances, unused

UP, DOWN = "blk.0.ffn_up_exps.weight", "blk.0.ffn_down.weight"


def columns(name, sums, counts, shape):
    entries = {name: (torch.tensor(sums), torch.tensor(counts))}
    return importances(entries, {name: shape})[name]


def test_importance_is_the_mean_square_of_each_column_for_each_expert():
    found = columns(UP, [[2.0, 4.0], [9.0, 3.0]], [2.0, 3.0], (2, 7, 2))
    assert found.values.tolist() == [[1.0, 2.0], [3.0, 1.0]]
    assert (found.blank, found.uncounted, found.floored) == ((), (), 0)


@pytest.mark.parametrize("counts", [[2.0], [[2.0]]])
def test_counts_may_be_a_column_as_the_file_has_them(counts):
    assert columns(DOWN, [[2.0, 4.0]], counts, (5, 2)).values.tolist() == [[1.0, 2.0]]


def test_a_converted_older_file_has_one_row_and_one_count_for_all_experts():
    """As llama-imatrix makes of a .dat file, and llama-quantize takes it."""
    found = columns(UP, [[2.0, 4.0, 6.0, 8.0]], [[2.0]], (2, 7, 2))
    assert found.values.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_counts_are_whole_tokens():
    assert columns(DOWN, [[6.0, 3.0]], [2.6], (5, 2)).values.tolist() == [[2.0, 1.0]]
    assert columns(DOWN, [[6.0, 3.0]], [0.4], (5, 2)).uncounted == (0,)


def test_an_expert_without_tokens_gets_ones_as_in_llama_quantize():
    found = columns(UP, [[2.0, 4.0], [0.0, 5.0]], [1.0, 0.0], (2, 7, 2))
    assert found.values.tolist() == [[2.0, 4.0], [1.0, 1.0]]
    assert (found.blank, found.uncounted) == ((), (1,))


def test_columns_of_zero_weigh_a_floor_under_the_others_of_their_row():
    found = columns(UP, [[0.0, 1.0, 3.0], [8.0, 0.0, 0.0]], [1.0, 1.0], (2, 7, 3))
    assert found.values.tolist() == [[2 * FLOOR, 1.0, 3.0], [8.0, 8 * FLOOR, 8 * FLOOR]]
    assert (found.blank, found.floored) == ((), 3)


def test_a_row_of_zeros_is_one_of_which_nothing_is_known():
    found = columns(UP, [[0.0, 0.0], [1.0, 2.0]], [4.0, 1.0], (2, 7, 2))
    assert (found.blank, found.uncounted, found.floored) == ((0,), (), 0)


def test_what_float32_has_no_room_for_is_nothing():
    found = columns(DOWN, [[1e-40, 4.0]], [1.0], (5, 2))
    assert found.values.tolist() == [[4 * FLOOR, 4.0]]
    assert columns(DOWN, [[1e-40, 1e-38]], [1.0], (5, 2)).blank == (0,)


def test_what_is_positive_stays_as_it_is():
    rng = np.random.default_rng(0)
    sums = (rng.gamma(0.5, 1.0, (1, 4096)) * 100).astype(np.float32)
    sums[0, :2] = 2 * NOTHING, 1e20
    found = importances({DOWN: (torch.from_numpy(sums), torch.ones(1))}, {DOWN: (5, 4096)})[DOWN]
    assert np.array_equal(found.values.numpy(), sums)
    assert found.floored == 0


@pytest.mark.parametrize("kind", [*kinds.SUPER_BLOCKS, *sorted(kinds.SEARCHED), "IQ4_XS", "IQ4_NL"])
@pytest.mark.parametrize("zeros", [slice(64, 128), slice(None, None, 2), slice(0, 248)])
def test_no_column_is_erased(kind, zeros):
    """What a text did not move is stored nearly as well as without an imatrix."""
    draw = torch.Generator().manual_seed(1)
    w = torch.randn(64, 256, generator=draw) * 0.02
    sums = torch.rand(1, 256, generator=draw) + 0.1
    sums[:, zeros] = 0
    found = importances({DOWN: (sums, torch.ones(1))}, {DOWN: (64, 256)})[DOWN]

    def error(importance):
        q = codec.decode(kind, codec.encode(kind, w, importance=importance), 256)
        return float((q - w)[:, zeros].norm() / w[:, zeros].norm())

    # a point of a grid holds eight columns, of which some matter and some do not
    most = 1.75 if kind in kinds.I_QUANTS else 1.5
    assert error(found.values[0]) < most * error(None)


def test_tensors_without_an_entry_are_left_out_and_entries_without_a_tensor_named():
    entries = {DOWN: (torch.ones(1, 2), torch.ones(1)), "other": (torch.ones(1, 2), torch.ones(1))}
    shapes = {DOWN: (5, 2), UP: (2, 7, 2)}
    assert list(importances(entries, shapes)) == [DOWN]
    assert unused(entries, shapes) == ["other"]


@pytest.mark.parametrize(
    ("sums", "counts", "says"),
    [
        (torch.ones(1, 3), torch.ones(1), r"in_sum2 has shape \[1, 3\], expected \[2, 2\]"),
        (torch.ones(2, 1), torch.ones(2), r"in_sum2 has shape \[2, 1\], expected \[2, 2\]"),
        (torch.ones(2, 2), torch.ones(3), r"counts has shape \[3\], expected \[2\]"),
        (
            torch.tensor([[1.0, -1.0], [1.0, 1.0]]),
            torch.ones(2),
            "in_sum2 has 1 negative, infinite or NaN values, the first at column 1 of expert 0",
        ),
        (torch.tensor([[1.0], [torch.nan]]).expand(2, 2), torch.ones(2), ".* has 2 .* expert 1"),
        (torch.ones(2, 2), torch.tensor([1.0, torch.inf]), "counts has 1 negative"),
        (torch.ones(2, 2), torch.tensor([1.0, -1.0]), "counts has 1 negative"),
    ],
)
def test_entries_of_another_size_or_no_squares_are_refused_by_name(sums, counts, says):
    with pytest.raises(QuantError, match=f"{UP}: {says}"):
        importances({UP: (sums, counts)}, {UP: (2, 7, 2)})
