"""A fit without a measurement: costs by role, and the mix that is started from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import qwen35_convert as q
from benchmarks.sparse import COMMON, Shape, write_sparse
from formats.family.slots import Form
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.fit.base import base_of
from qwen35_convert.fit.by_role import ByRole
from qwen35_convert.fit.sizes import sizes_of
from tests.qwen35_convert.command import called

SMALL = COMMON | {
    "vocab_size": 2048, "hidden_size": 256, "head_dim": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "num_hidden_layers": 8,
}  # fmt: skip
DENSE = {"model_type": "qwen3_5_text", "intermediate_size": 512}
EXPERTS = {
    "model_type": "qwen3_5_moe_text", "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256,
}  # fmt: skip


@pytest.fixture(scope="module", params=["dense", "experts"])
def zeros(request, tmp_path_factory, nano_path):
    """A checkpoint of which nothing could be measured."""
    folder = tmp_path_factory.mktemp("zeros") / request.param
    form = Form(experts="fused", mtp_experts="split", mtp_layers=1, vision=True, head=True)
    write_sparse(folder, Shape(SMALL | (DENSE if request.param == "dense" else EXPERTS), form=form))
    shutil.copy(nano_path / "tokenizer.json", folder)
    return folder


@pytest.mark.parametrize("out", ["m.gguf", "m"])
@pytest.mark.parametrize("bits", [7.0, pytest.param(9.0, marks=pytest.mark.all)])
def test_the_written_files_have_the_bytes_that_were_planned(zeros, tmp_path, out, bits):
    fitted = q.fit_recipe(zeros, out, q.Goal(bits=bits, by_role=True))
    assert "not measured on this model" in fitted.told
    q.convert(zeros, tmp_path / out, fitted.recipe, q.RunOptions(verify=False, workers=1))
    made = tmp_path / out
    files = [made] if made.is_file() else sorted(made.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) == fitted.nbytes <= fitted.budget


def test_more_bytes_cost_less_and_first_and_last_layers_more(zeros):
    source, recipe = open_checkpoint(zeros), q.read_recipe("gguf-q4_k_m")
    sizes = sizes_of(source, recipe, Path("m.gguf"), ("q4_k", "q6_k", "iq2_s"))
    costs, units = ByRole.of(source, sizes), {unit.name: unit for unit in sizes.units}
    first, middle, last = (
        units[f"blk.{i}.ffn_down{'_exps' if 'experts' in zeros.name else ''}.weight"]
        for i in (0, 4, 7)
    )
    assert costs.cost(first, "q4_k") > costs.cost(first, "q6_k") > 0
    assert costs.cost(first, "q4_k") > costs.cost(middle, "q4_k") < costs.cost(last, "q4_k")
    assert costs.cost(first, "unknown") is None
    assert costs.cost(first, "iq2_s") is None, "it needs an importance matrix"


def test_a_fit_is_not_predicted_to_be_worse_than_the_mix_of_its_size(zeros):
    for mix in ("q4_k_m", "q6_k"):
        recipe = q.read_recipe(f"gguf-{mix}")
        size = q.plan(zeros, recipe, "m.gguf").nbytes
        source = open_checkpoint(zeros)
        sizes = sizes_of(source, recipe, Path("m.gguf"), ("q4_k", "q5_k", "q6_k", "q8_0"))
        costs = ByRole.of(source, sizes)
        own = sum(costs.cost(unit, unit.planned) for unit in sizes.units)
        fitted = q.fit_recipe(zeros, "m.gguf", q.Goal(size=size, by_role=True), recipe)
        assert fitted.kl <= own * (1 + 1e-9)
        assert fitted.nbytes <= size


def test_what_has_no_cost_has_the_types_of_our_largest_mix_that_fits(zeros):
    source, recipe = open_checkpoint(zeros), q.read_recipe("gguf-q8_0")
    size = q.plan(zeros, "gguf-q5_k_m", "m.gguf").nbytes
    assert base_of(source, recipe, q.Goal(size=size), Path("m.gguf")).quantize.scheme == "q5_k_m"
    below = base_of(source, recipe, q.Goal(size=size - 1), Path("m.gguf"))
    assert below.quantize.scheme == "q4_k_m"
    assert base_of(source, recipe, q.Goal(bits=1.0), Path("m.gguf")).quantize.scheme == "q2_k"
    assert base_of(source, recipe, q.Goal(bits=12.0), Path("m.gguf")) is recipe
    named = q.read_recipe("gguf-q6_k")
    assert base_of(source, named, q.Goal(bits=3.0), Path("m.gguf")) is named
    fitted = q.fit_recipe(zeros, "m.gguf", q.Goal(size=size, by_role=True))
    mix, plan = (q.plan(zeros, one, "m.gguf").tensors for one in ("gguf-q5_k_m", fitted.recipe))
    for name, info in mix.items():
        if name.startswith("blk.8.") or "ssm_alpha" in name:
            assert plan[name].dtype == info.dtype


def test_the_command_says_what_its_costs_rest_on(zeros, tmp_path):
    words = ("--target-bpw", "6", "--sensitivity", "by-role", "--no-verify", "--plan")
    done = called("convert", zeros, "-o", tmp_path / "m.gguf", *words)
    assert done.returncode == 0, done.stderr
    assert "not measured on this model" in done.stderr
