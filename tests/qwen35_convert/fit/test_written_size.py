"""What `--fit` plans for a model of some size is what is written, to the byte."""

from __future__ import annotations

import shutil

import pytest

import qwen35_convert as q
from formats.family.slots import Form
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.serving.memory import memory_needed
from tests.checkpoints import hub_config, make_weights, write_checkpoint

CONTEXT, BATCH = 4096, 2
SIZES = {
    "hidden_size": 256, "vocab_size": 4096, "head_dim": 128, "num_attention_heads": 4,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "num_hidden_layers": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention",
                    "full_attention"] * 2,
}  # fmt: skip
WIDTHS = {
    False: {"intermediate_size": 768},
    True: {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "num_experts": 8},
}


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def middling(request, tmp_path_factory, nano_path):
    """A checkpoint of some 10 to 20 million random weights in two shards."""
    folder = tmp_path_factory.mktemp("middling") / "model"
    config = hub_config(moe=request.param, **SIZES, **WIDTHS[request.param])
    weights = make_weights(config, Form(vision=True))
    write_checkpoint(folder, config, weights, shards=2)
    shutil.copy(nano_path / "tokenizer.json", folder)
    return folder


@pytest.mark.parametrize(
    ("out", "engine", "bits"), [("m.gguf", "llama.cpp", 4.0), ("out", "vllm", 10.0)]
)
def test_the_files_of_a_fit_have_the_bytes_that_were_planned(middling, tmp_path, out, engine, bits):
    source = open_checkpoint(middling)
    count = q.plan(middling, "gguf-q8_0", "m.gguf", overrides=["vision=drop"]).nbytes * 8 / 8.5
    wanted = int(count * bits / 8)
    memory = memory_needed(source.config, wanted, CONTEXT, BATCH, engine).total
    goal = q.Goal(memory=memory, context=CONTEXT, batch=BATCH, by_role=True)
    fitted = q.fit_recipe(middling, out, goal, overrides=["vision=drop"])
    made, options = tmp_path / out, q.RunOptions(verify=False, workers=1)
    q.convert(middling, made, fitted.recipe, options)
    files = [made] if made.is_file() else sorted(made.glob("*.safetensors"))
    written = sum(file.stat().st_size for file in files)
    assert written == fitted.nbytes <= fitted.budget
    assert written > 0.97 * fitted.budget, "the bytes are spent"
    needed = memory_needed(source.config, written, CONTEXT, BATCH, engine).total
    assert needed <= memory
