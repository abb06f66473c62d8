from __future__ import annotations

import pytest
import torch

from quant.errors import QuantError
from quant.importance import importances, unused

UP, DOWN = "blk.0.ffn_up_exps.weight", "blk.0.ffn_down.weight"


def test_importance_is_the_mean_square_of_each_column_for_each_expert():
    entries = {UP: (torch.tensor([[2.0, 4.0], [9.0, 0.0]]), torch.tensor([2.0, 3.0]))}
    assert importances(entries, {UP: (2, 7, 2)})[UP].tolist() == [[1.0, 2.0], [3.0, 0.0]]


def test_counts_may_be_a_column_as_the_file_has_them():
    entries = {DOWN: (torch.tensor([[2.0, 4.0]]), torch.tensor([[2.0]]))}
    assert importances(entries, {DOWN: (5, 2)})[DOWN].tolist() == [[1.0, 2.0]]


def test_an_expert_without_tokens_gets_ones():
    entries = {UP: (torch.tensor([[2.0, 4.0], [0.0, 0.0]]), torch.tensor([1.0, 0.0]))}
    assert importances(entries, {UP: (2, 7, 2)})[UP].tolist() == [[2.0, 4.0], [1.0, 1.0]]


def test_tensors_without_an_entry_are_left_out_and_entries_without_a_tensor_named():
    entries = {DOWN: (torch.ones(1, 2), torch.ones(1)), "other": (torch.ones(1, 2), torch.ones(1))}
    shapes = {DOWN: (5, 2), UP: (2, 7, 2)}
    assert list(importances(entries, shapes)) == [DOWN]
    assert unused(entries, shapes) == ["other"]


@pytest.mark.parametrize(
    ("sums", "counts", "says"),
    [
        (torch.ones(1, 3), torch.ones(1), r"in_sum2 has shape \[1, 3\],\n  expected \[2, 2\]"),
        (torch.ones(4), torch.ones(2), r"in_sum2 has shape \[4\],\n  expected \[2, 2\]"),
        (torch.ones(2, 2), torch.ones(1), r"counts has shape \[1\],\n  expected \[2\]"),
        (torch.tensor([[1.0, -1.0], [1.0, 1.0]]), torch.ones(2), "in_sum2 has a negative"),
        (torch.tensor([[1.0, torch.nan], [1.0, 1.0]]), torch.ones(2), "in_sum2 has a negative"),
        (torch.ones(2, 2), torch.tensor([1.0, torch.inf]), "counts has a negative"),
    ],
)
def test_entries_of_another_size_or_no_squares_are_refused_by_name(sums, counts, says):
    with pytest.raises(QuantError, match=f"{UP}: {says}"):
        importances({UP: (sums, counts)}, {UP: (2, 7, 2)})
