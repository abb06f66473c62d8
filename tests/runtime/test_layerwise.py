"""The walk through a checkpoint: against the whole model, and what an observer sees of it."""

from __future__ import annotations

import pytest
import torch

from qwen35_convert.containers.registry import open_checkpoint
from runtime.errors import RequestError
from runtime.imatrix import collect
from runtime.layerwise import Walk
from runtime.load import Loader
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.runtime.models import distance, load, some_ids, write

ON_CPU = {"device": "cpu", "dtype": torch.float32}


class Hessians:
    """What GPTQ needs: x^T x of every linear, and how often each was called."""

    def __init__(self):
        self.sums, self.rows = {}, {}

    def observe(self, names, x_TK):
        for name in names:
            self.sums[name] = self.sums.get(name, 0) + x_TK.double().T @ x_TK.double()
            self.rows[name] = self.rows.get(name, 0) + len(x_TK)


@pytest.fixture(scope="module", params=["dense", "moe", "absorbed"])
def case(request, tmp_path_factory):
    """A checkpoint and three texts; in "absorbed" the shared expert is of the experts' size."""
    moe = request.param != "dense"
    same = {"shared_expert_intermediate_size": 40} if request.param == "absorbed" else {}
    config = hub_config(moe=moe, sizes="ragged", **same)
    folder = write_checkpoint(tmp_path_factory.mktemp("walk"), config, make_weights(config))
    ids = torch.tensor(some_ids(70, load(folder)))
    return open_checkpoint(folder), list(ids.split([40, 2, 28]))


def walked(checkpoint, texts, observer=None):
    return list(Walk.over(checkpoint, texts, **ON_CPU, observer=observer).residuals())


def test_texts_of_any_length_are_walked_as_each_is_alone(case):
    checkpoint, texts = case
    together = walked(checkpoint, texts)
    alone = [walked(checkpoint, [ids]) for ids in texts]
    for layer, x in enumerate(together):
        assert distance(x, torch.cat([one[layer] for one in alone])) < 1e-5


def test_looking_does_not_change_what_is_seen(case):
    checkpoint, texts = case
    for x, observed in zip(
        walked(checkpoint, texts), walked(checkpoint, texts, Hessians()), strict=True
    ):
        assert distance(observed, x) < 1e-6


def test_an_observer_can_sum_what_gptq_needs(case):
    """The diagonal of x^T x is a row of the importance matrix."""
    checkpoint, texts = case
    hessians, imatrix = Hessians(), collect(checkpoint, texts)
    walk = Walk.over(checkpoint, texts, **ON_CPU, observer=hessians)
    *_, x = walk.residuals()
    walk.mtp(walk.hidden(x))
    assert hessians.sums.keys() == imatrix.sums.keys()
    assert hessians.rows == imatrix.counts
    for name, sums in imatrix.sums.items():
        torch.testing.assert_close(hessians.sums[name].diagonal(), sums)


def test_every_linear_of_the_layers_is_observed(case):
    checkpoint, texts = case
    hessians = Hessians()
    walked(checkpoint, texts, hessians)
    atoms = checkpoint.layout.atoms
    linears = {name for name in atoms if name.startswith("layers.") and len(atoms[name].shape) == 2}
    assert set(hessians.sums) == linears
    for name, sums in hessians.sums.items():
        assert sums.shape == (atoms[name].shape[1],) * 2


def test_experts_without_tokens_are_not_read(tmp_path, monkeypatch):
    folder = write(tmp_path, moe=True, num_experts_per_tok=1)
    read = []
    linear = Loader.linear
    monkeypatch.setattr(Loader, "linear", lambda self, *n: read.extend(n) or linear(self, *n))
    walked(open_checkpoint(folder), [torch.tensor([3, 4])])
    experts = {name for name in read if name.startswith("layers.0.mlp.experts.")}
    assert 3 <= len(experts) <= 6


@pytest.mark.parametrize("texts", [[], [torch.tensor([1])], [torch.tensor([[1, 2]])]])
def test_texts_of_less_than_two_tokens_are_refused(case, texts):
    with pytest.raises(RequestError, match="expected texts of 2 tokens at least"):
        walked(case[0], texts)


def test_ids_outside_the_vocabulary_are_refused(case):
    checkpoint, _ = case
    size = checkpoint.config.sizes["V"]
    with pytest.raises(RequestError, match=f"reach from 1 to {size}, expected 0 to {size - 1}"):
        walked(checkpoint, [torch.tensor([1, 2]), torch.tensor([1, size])])
