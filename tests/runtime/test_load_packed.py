from __future__ import annotations

import pytest
import torch

from qwen35_convert import api
from runtime.kernels.linear.packed import PackedWeight
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.runtime.models import (
    SHORT,
    distance,
    full,
    load,
    needs_cuda,
    pools_for,
    run,
    some_ids,
)

# INT4 without zero points
RECIPES = {"nvfp4a16": [], "int4-g32": ["quantize.symmetric=true"]}


def converted(tmp_path, recipe, *, is_moe):
    config = hub_config(moe=is_moe, hidden_size=256, **SHORT)
    source = write_checkpoint(tmp_path / "source", config, make_weights(config))
    out = tmp_path / "out"
    options = api.RunOptions(verify=False)
    api.convert(source, out, recipe, options, overrides=RECIPES[recipe])
    return out


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "moe"])
def test_weights_of_four_bits_are_packed_without_loss(tmp_path, recipe, is_moe):
    out = converted(tmp_path, recipe, is_moe=is_moe)
    kept, expected = load(out, keep_fp8=True), load(out)
    for weight in (kept.layers[0].mixer.qkvz, kept.layers[0].feed_forward.gate_up):
        assert isinstance(weight, PackedWeight)
    ids = some_ids(40, expected)
    assert distance(full(kept, ids), full(expected, ids)) < 1e-5


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "moe"])
def test_a_gpu_multiplies_with_weights_of_four_bits(tmp_path, recipe, is_moe):
    out = converted(tmp_path, recipe, is_moe=is_moe)
    ids = some_ids(75, load(out))
    exact = full(load(out), ids)
    decoded, packed = (
        distance(run(model, ids, pools_for(model), decode=5).float().cpu(), exact)
        for model in (load(out, torch.bfloat16, "cuda", keep_fp8=kept) for kept in (False, True))
    )
    assert packed < 1.2 * decoded
