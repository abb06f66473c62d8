"""How far changed weights move the residual stream: against two walks of whole layers."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from quant.stored import Value
from qwen35_convert.containers.registry import open_checkpoint
from runtime.layerwise import Walk
from runtime.moved import moved_by
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.runtime.models import load, some_ids


@dataclass(frozen=True, slots=True)
class Halved(Value):
    """A value of which half is read."""

    def exact(self, start, stop):
        return Value.exact(self, start, stop) * 0.5

    def pick(self, index):
        return Value.pick(self, index) * 0.5


def halving(name):
    def change(value):
        if value.atom.name != name:
            return value
        return Halved(**{slot: getattr(value, slot) for slot in Value.__slots__})

    return change


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def case(request, tmp_path_factory):
    config = hub_config(moe=request.param, sizes="ragged")
    folder = write_checkpoint(tmp_path_factory.mktemp("moved"), config, make_weights(config))
    ids = torch.tensor(some_ids(24, load(folder))).view(2, 12)
    return open_checkpoint(folder), ids


def test_a_layer_moves_by_what_its_changed_weights_do_to_the_sources_inputs(case):
    source, ids = case
    changes = [halving("layers.1.linear_attn.out_proj"), halving("layers.0.linear_attn.out_proj")]
    moved = list(moved_by(source, lambda _: changes, ids, device="cpu"))
    plain = Walk.over(source, list(ids), device="cpu", dtype=torch.float32)
    changed = Walk.over(source, list(ids), device="cpu", dtype=torch.float32)
    changed.use_changed(changes[0])
    x = plain.layer(0, plain.embedded())
    expected = (changed.layer(1, x) - plain.layer(1, x)).double().square().sum(1).mean()
    assert moved[1][0] == pytest.approx(float(expected), rel=1e-4)
    assert moved[0][0] == moved[1][1] == 0.0
    assert moved[0][1] > 0


def test_layers_without_changes_have_nothing_to_tell(case):
    source, ids = case
    layers = len(source.config.layer_types)
    assert list(moved_by(source, lambda _: [], ids, device="cpu")) == [[]] * layers
