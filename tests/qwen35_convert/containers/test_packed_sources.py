"""Checkpoints of GPTQ, AWQ, AutoRound and llm-compressor, read as they decode by hand in float64."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from formats.errors import FormatError
from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.options import RunOptions
from qwen35_convert.recipe import build_recipe
from tests import packed
from tests.checkpoints import hub_config, make_weights, split_experts
from tests.formats.layouts import FP8_ROLES, role_of
from tests.qwen35_convert.containers.gguf.test_convert_gguf import written

NANO = Path(__file__).parents[2] / "data" / "nano-dense"
KEEP = build_recipe({"layout": "hub", "quantize": {"scheme": "keep"}})
FAST = RunOptions(workers=1)
GROUP = 32
UP = "model.language_model.layers.1.mlp.up_proj."


def gptq_block(bits=4, **changes):
    return {
        "quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": True, "desc_act": False,
        "checkpoint_format": "gptq", "lm_head": False, "dynamic": {"-:.*mtp.*": {}},
    } | changes  # fmt: skip


def awq_block(**changes):
    left = ["visual", "mtp", "in_proj_a", "in_proj_b", "shared_expert_gate", "embed_tokens"]
    return {
        "quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True,
        "version": "gemm", "modules_to_not_convert": left,
    } | changes  # fmt: skip


def auto_round_block(packing, **changes):
    extra = {"model.language_model.layers.0.linear_attn.in_proj_a": {"bits": 16}}
    return {
        "quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": GROUP,
        "sym": True, "data_type": "int", "extra_config": extra, "autoround_version": "0.16.1",
        "block_name_to_quantize": "model.language_model.layers",
    } | changes  # fmt: skip


def compressed_block(form="pack-quantized", inputs=None, **weights):
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    args |= {"symmetric": True, "dynamic": False} | weights
    group = {"targets": ["Linear"], "weights": args, "input_activations": inputs, "format": form}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
AR = "auto_round:auto_gptq"
# case: bits and zeros, how a weight is stored, the block
CASES = {
    "gptq": ({"symmetric": True}, packed.gptq, gptq_block()),
    "gptq-bf16": (
        {"symmetric": True},
        partial(packed.gptq, scales=torch.bfloat16),
        gptq_block(dynamic=None),
    ),
    "gptq-no-format": ({"symmetric": True}, packed.gptq, gptq_block(checkpoint_format=None)),
    "gptq-asymmetric": ({"symmetric": False}, packed.gptq, gptq_block(sym=False)),
    "gptq-v2": (
        {"symmetric": False},
        partial(packed.gptq, v2=True),
        gptq_block(sym=False, checkpoint_format="gptq_v2"),
    ),
    "gptq-order": ({"symmetric": True, "order": True}, packed.gptq, gptq_block(desc_act=True)),
    "gptq-8": ({"symmetric": True, "bits": 8}, packed.gptq, gptq_block(bits=8)),
    "gptq-8-order": (
        {"symmetric": False, "bits": 8, "order": True},
        partial(packed.gptq, v2=True),
        gptq_block(bits=8, sym=False, desc_act=True, checkpoint_format="gptq_v2"),
    ),
    "gptq-without-g_idx": ({"symmetric": True}, partial(packed.gptq, g_idx=False), gptq_block()),
    "awq": ({"symmetric": False}, packed.awq, awq_block()),
    "awq-bf16": ({"symmetric": False}, partial(packed.awq, scales=torch.bfloat16), awq_block()),
    "auto-round": ({"symmetric": True}, partial(packed.gptq, g_idx=False), auto_round_block(AR)),
    "auto-round-v2": (
        {"symmetric": False},
        partial(packed.gptq, v2=True, g_idx=False),
        auto_round_block("auto_round", sym=False),
    ),
    "auto-round-awq": (
        {"symmetric": False}, packed.awq, auto_round_block("auto_round:auto_awq", sym=False),
    ),
    "auto-round-compressed": (
        {"symmetric": True},
        partial(packed.compressed, symmetric=True),
        auto_round_block("auto_round:llm_compressor"),
    ),
    "compressed": ({"symmetric": True}, partial(packed.compressed, symmetric=True),
                   compressed_block()),
    "compressed-f16": (
        {"symmetric": True},
        partial(packed.compressed, symmetric=True, scales=torch.float16),
        compressed_block(),
    ),
    "compressed-asymmetric": (
        {"symmetric": False},
        partial(packed.compressed, symmetric=False),
        compressed_block(symmetric=False),
    ),
    "compressed-order": (
        {"symmetric": True, "order": True},
        partial(packed.compressed, symmetric=True, order=True),
        compressed_block(actorder="group"),
    ),
    "compressed-asymmetric-order": (
        {"symmetric": False, "order": True},
        partial(packed.compressed, symmetric=False, order=True),
        compressed_block(symmetric=False, actorder="group"),
    ),
    "compressed-channel": (
        {"symmetric": True, "group": None},
        partial(packed.compressed, symmetric=True),
        compressed_block(strategy="channel", group_size=None),
    ),
    "compressed-channel-asymmetric": (
        {"symmetric": False, "group": None},
        partial(packed.compressed, symmetric=False),
        compressed_block(strategy="channel", group_size=None, symmetric=False),
    ),
    "compressed-8": (
        {"symmetric": True, "bits": 8},
        partial(packed.compressed, symmetric=True),
        compressed_block(num_bits=8),
    ),
    "compressed-8-asymmetric": (
        {"symmetric": False, "bits": 8, "group": None},
        partial(packed.compressed, symmetric=False, scales=torch.float16),
        compressed_block(num_bits=8, strategy="channel", group_size=None, symmetric=False),
    ),
    "int8": (
        {"symmetric": True, "bits": 8, "group": None},
        partial(packed.int_quantized, symmetric=True),
        compressed_block("int-quantized", TOKENS, num_bits=8, strategy="channel", group_size=None),
    ),
    "int8-asymmetric-groups": (
        {"symmetric": False, "bits": 8},
        partial(packed.int_quantized, symmetric=False),
        compressed_block("int-quantized", TOKENS, num_bits=8, symmetric=False),
    ),
}  # fmt: skip


def source_of(folder, how, store, block, *, moe=False):
    """Write a checkpoint and its original; return both and what each weight decodes to."""
    config = hub_config(moe=moe, linear_value_head_dim=64, vocab_size=2048)
    weights = split_experts(make_weights(config))
    original, stored, exact = dict(weights), {}, {}
    for name, w in weights.items():
        if role_of(name) not in FP8_ROLES or w.dim() != 2 or name.startswith("mtp"):
            stored[name] = w
            continue
        size = {"group": how.get("group", GROUP) or w.shape[1]}
        codes = packed.nearest(w, **how | size)
        stored |= store(name.removesuffix("weight"), codes)
        exact[name] = codes.values
    if block.get("quant_method") == "compressed-tensors":
        kept = [n.removesuffix(".weight") for n, w in stored.items() if w.is_floating_point()]
        listed = [n for n in kept if n not in {e.removesuffix(".weight") for e in exact}]
        two = [n for n in listed if stored.get(f"{n}.weight", torch.empty(0)).dim() > 1]
        block = block | {"ignore": ["lm_head", *two]}
    quantised = config | {"quantization_config": block}
    source = written(folder / "in", quantised, stored, NANO)
    return source, written(folder / "original", config, original, NANO), exact


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that writes a case once."""
    known = {}

    def make(case):
        if case not in known:
            known[case] = source_of(tmp_path_factory.mktemp(case), *CASES[case])
        return known[case]

    return make


@pytest.mark.parametrize("case", CASES)
def test_a_folder_holds_code_less_zero_times_step_rounded_once(made, tmp_path, case):
    source, _, exact = made(case)
    done = api.convert(source, tmp_path / "out", KEEP, FAST)
    assert done.report.passed, done.report.failures
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert len(exact) == 25
    for name, value in exact.items():
        assert torch.equal(found[name], value.float().to(torch.bfloat16)), name


@pytest.mark.parametrize("case", CASES)
def test_as_an_artifact_it_is_right(made, case):
    source, original, _ = made(case)
    report = api.verify(source, original)
    assert report.passed, report.failures


LABELS = {
    "gptq": "gptq-int4", "gptq-8": "gptq-int8", "awq": "awq-int4", "auto-round": "gptq-int4",
    "compressed-8": "int8a16", "int8": "int8",
}  # fmt: skip


@pytest.mark.parametrize("case", LABELS)
def test_inspect_says_what_it_is(made, case):
    inspection = api.inspect(made(case)[0])
    assert inspection.quantization == LABELS[case]
    assert not inspection.problems
