"""Checkpoints of GPTQ, AWQ, AutoRound and llm-compressor: what they decode to is by hand."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.errors import FormatError
from quant.errors import QuantError
from quant.opening import open_value
from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.inspection.source import inspect
from qwen35_convert.options import RunOptions
from qwen35_convert.recipe.recipe import build_recipe
from qwen35_convert.text.generation import Prompt
from tests import packed
from tests.checkpoints import hub_config, make_weights, split_experts
from tests.formats.layouts import FP8_ROLES, role_of
from tests.qwen35_convert.containers.gguf.test_convert_gguf import written
from tests.qwen35_convert.hub.hub_server import only_hub

NANO = Path(__file__).parents[2] / "data" / "nano-dense"
KEEP = build_recipe({"layout": "hub", "quantize": {"scheme": "keep"}})
FAST = RunOptions(workers=1)
GROUP = 32
UP = "model.language_model.layers.1.mlp.up_proj."
INSIDE = ["attn", "gate_proj", "up_proj", *(f"layers.{i}.mlp" for i in (0, 2, 3))]
DOWN = UP.replace("up_proj", "down_proj")


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
    "auto-round-compressed-8": (
        {"symmetric": True, "bits": 8},
        partial(packed.compressed, symmetric=True),
        auto_round_block("auto_round:llm_compressor", bits=8),
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
    inspection = inspect(made(case)[0])
    assert inspection.quantization == LABELS[case]
    assert not inspection.problems


@pytest.fixture
def copied(made, tmp_path):
    """Return a function that copies a case and changes its tensors and its config."""

    def copy(case="gptq", tensors=None, **block):
        source, original, exact = made(case)
        folder = shutil.copytree(source, tmp_path / "copy")
        if tensors is not None:
            held = load_file(folder / "model.safetensors")
            tensors(held)
            save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= block
        (folder / "config.json").write_text(json.dumps(config))
        return folder, original, exact

    return copy


@pytest.mark.parametrize("scheme", ["fp8-channel", "int4"])
@pytest.mark.parametrize("case", ["gptq-order", "awq", "compressed-asymmetric-order"])
def test_it_is_converted_on_to_another_scheme(made, tmp_path, case, scheme):
    choices = {"group": 32} if scheme == "int4" else {}
    recipe = build_recipe({"layout": "hub", "quantize": {"scheme": scheme} | choices})
    done = api.convert(made(case)[0], tmp_path / "out", recipe, FAST)
    assert done.report.passed, done.report.failures
    (note,) = [note for note in done.plan.notes if "two roundings" in note]
    assert open_checkpoint(made(case)[0]).layout.quantized in note


@pytest.mark.parametrize("case", ["gptq-order", "awq"])
def test_it_is_converted_on_to_gguf(made, tmp_path, case):
    """Value heads are moved: rows of in_proj, columns of out_proj, whatever word they share."""
    source, _, exact = made(case)
    values = {"quantize": {"scheme": "f32"}, "export": {"format": "gguf"}, "mtp": "drop"}
    done = api.convert(source, tmp_path / "m.gguf", build_recipe(values), FAST)
    assert done.report.passed, done.report.failures
    back = api.convert(tmp_path / "m.gguf", tmp_path / "back", build_recipe({
        "quantize": {"scheme": "keep"}, "mtp": "drop",
    }), FAST)  # fmt: skip
    assert back.report.passed, back.report.failures
    found = load_file(tmp_path / "back" / "model.safetensors")
    for name, value in exact.items():
        text = name.replace("model.language_model.", "model.")
        assert torch.equal(found[text], value.float().to(found[text].dtype)), name


@pytest.mark.parametrize("case", ["gptq-order", "awq", "compressed-8"])
def test_it_runs(made, case):
    assert "".join(api.run_text(made(case)[0], Prompt("In the beginning", max_tokens=3)))


@pytest.mark.parametrize("beside", [False, True], ids=["in config.json", "beside it"])
@pytest.mark.parametrize("case", ["gptq-order", "awq"])
def test_it_is_read_from_the_hub_as_it_comes(made, tmp_path, monkeypatch, case, beside):
    source, _, exact = made(case)
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    if beside:
        config = json.loads(files["config.json"])
        name = "quant_config.json" if case == "awq" else "quantize_config.json"
        files[name] = json.dumps(config.pop("quantization_config")).encode()
        files["config.json"] = json.dumps(config).encode()
    with only_hub(tmp_path, monkeypatch) as hub:
        hub.repo("acme/Packed").commit(files)
        streamed = RunOptions(workers=1, stream=True)
        done = api.convert("acme/Packed", tmp_path / "out", KEEP, options=streamed)
    assert done.report.passed, done.report.failures
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[n], v.float().bfloat16()) for n, v in exact.items())


@pytest.mark.parametrize("case", ["gptq-order", "awq", "compressed-asymmetric"])
def test_any_rows_are_read_by_themselves(made, case):
    source, _, exact = made(case)
    checkpoint = open_checkpoint(source)
    value = open_value(checkpoint, checkpoint.layout.atoms["layers.1.mlp.up_proj"])
    whole = exact[UP + "weight"].float()
    for start, stop in ((0, 1), (3, 9), (8, 16), (383, 384), (5, 384)):
        assert torch.equal(value.exact(start, stop), whole[start:stop])
    index = torch.tensor([17, 3, 3, 300])
    assert torch.equal(value.pick(index), whole[index])


def test_experts_are_packed_one_by_one(tmp_path):
    block = gptq_block(dynamic={"-:.*mtp.*": {}})
    source, original, exact = source_of(tmp_path, *CASES["gptq"][:2], block, moe=True)
    assert api.verify(source, original).passed
    done = api.convert(source, tmp_path / "out", KEEP, FAST)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert done.report.passed
    assert all(torch.equal(found[n], v.float().bfloat16()) for n, v in exact.items())
    assert sum(".experts." in name for name in exact) == 48


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json"])
def test_the_block_may_stand_beside_config_json(copied, file):
    case = "gptq" if file == "quantize_config.json" else "awq"
    folder, original, _ = copied(case)
    config = json.loads((folder / "config.json").read_text())
    block = config.pop("quantization_config")
    del block["quant_method"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / file).write_text(json.dumps(block))
    report = api.verify(folder, original)
    assert report.passed, report.failures
    assert file in open_checkpoint(folder).beside


@pytest.mark.parametrize("says", ["the same", "otherwise"])
def test_a_file_that_repeats_the_block_is_right(copied, says):
    folder, original, _ = copied("gptq")
    block = gptq_block() | ({} if says == "the same" else {"desc_act": True})
    (folder / "quantize_config.json").write_text(json.dumps(block))
    failures = api.verify(folder, original, level="structure").failures
    assert [f.tensor for f in failures] == ([] if says == "the same" else ["quantize_config.json"])


@pytest.mark.parametrize(
    ("case", "changes", "says"),
    [
        ("gptq", {"checkpoint_format": "gptq_v3"}, "checkpoint_format is 'gptq_v3'"),
        ("gptq", {"checkpoint_format": "marlin"}, "expected gptq or gptq_v2"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format is true"),
        ("gptq", {"bits": 3}, "bits is 3"),
        ("awq", {"bits": 8}, "bits is 8"),
        ("awq", {"version": "gemv"}, "version is 'gemv'"),
        ("auto-round", {"packing_format": "auto_round:fake"}, "packing_format is 'auto_round:fa"),
        ("gptq", {"quant_method": "exl3"}, "the checkpoint is quantised by exl3"),
    ],
)
def test_formats_that_nobody_here_reads_are_refused_by_name(copied, case, changes, says):
    folder, _, _ = copied(case, **changes)
    with pytest.raises(FormatError, match=says):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "block", "says"),
    [
        (lambda t: t.pop(UP + "qzeros"), {}, "qweight has no qzeros beside it"),
        (lambda t: t.pop(UP + "scales"), {}, "qweight has no scales beside it"),
        (lambda t: t.pop(UP + "g_idx"), {"desc_act": True}, "qweight has no g_idx beside it"),
        (lambda t: t.update({UP + "scales": t[UP + "scales"][:3]}), {}, "not a whole number of 3"),
        (lambda t: t.pop(UP + "qweight"), {}, "was written by GPTQ"),
        (None, {"bits": 8}, "has 4 bits by its shape, but quantization_config says 8"),
        (None, {"group_size": 64}, "has groups of 32 columns by its shape"),
        (
            None,
            {"quant_method": "awq", "checkpoint_format": None},
            "is laid out as GPTQ, but quantization_config says",
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(copied, tmp_path, change, block, says):
    case = "gptq-order" if "desc_act" in block else "gptq"
    folder, _, _ = copied(case, change, **block)
    with pytest.raises(FormatError, match=says):
        api.convert(folder, tmp_path / "out", KEEP, FAST)
    assert says in " ".join(f"{p['tensor']} {p['problem']}" for p in inspect(folder).problems)


def _outside(tensors):
    tensors[UP + "g_idx"][5] = 99


def _zeros(tensors):
    tensors[UP + "qzeros"] += 1


def test_a_group_that_has_no_step_is_refused_by_name(copied, tmp_path):
    folder, original, _ = copied("gptq-order", _outside)
    with pytest.raises(QuantError, match=r"layers.1.mlp.up_proj.*column 5 is in group 99"):
        api.convert(folder, tmp_path / "out", KEEP, FAST)
    failures = api.verify(folder, original).failures
    assert (UP + "g_idx", "has 1 columns in a group that has no scale") in [
        (failure.tensor, failure.problem) for failure in failures
    ]


@pytest.mark.parametrize(
    ("change", "block", "says"),
    [
        (_zeros, {}, "has zero points, but sym is true"),
        (None, {"desc_act": False}, "in another order, but desc_act is false"),
        (None, {"dynamic": {"-:.*up_proj": {}}}, "but dynamic in config.json leaves it alone"),
    ],
)
def test_what_an_engine_would_read_otherwise_is_named(copied, change, block, says):
    folder, original, _ = copied("gptq-order" if "desc_act" in block else "gptq", change, **block)
    failures = api.verify(folder, original, level="structure").failures
    assert failures
    assert all(says in failure.problem for failure in failures), failures


def test_a_list_of_awq_that_names_a_part_of_a_quantised_name_is_named(copied):
    folder, original, _ = copied("awq", modules_to_not_convert=["mlp.gate"])
    failures = api.verify(folder, original, level="structure").failures
    assert {f.tensor.rsplit(".", 1)[-1] for f in failures} == {"gate_proj"}


@pytest.mark.parametrize("inside", [{}, {"modules_in_block_to_quantize": [["model.layers"]]}])
def test_experts_that_no_rule_leaves_alone_are_named(tmp_path, inside):
    """vLLM takes experts for quantised, whatever their headers say, or a list of linears."""
    block = gptq_block(dynamic=None, **inside)
    source, original, _ = source_of(tmp_path, *CASES["gptq"][:2], block, moe=True)
    failures = api.verify(source, original, level="structure").failures
    assert failures
    assert all(f.tensor.startswith("mtp.layers.0.mlp.experts.") for f in failures)
    assert all("vLLM looks for its codes" in f.problem for f in failures)


@pytest.mark.parametrize(
    ("case", "block", "reader"),
    [
        ("gptq", {}, "gptqmodel"),
        ("gptq", {"dynamic": {"-:.*layers\\.1\\.mlp\\.down_proj": {}}}, None),
        ("gptq", {"modules_in_block_to_quantize": [INSIDE]}, None),
        ("awq", {}, "vLLM"),
        ("awq", {"modules_to_not_convert": []}, None),
    ],
)
def test_a_linear_that_no_list_leaves_alone_is_named(copied, case, block, reader):
    """vLLM takes it by its header, unless a list of AWQ says something; gptqmodel by its rules."""

    def keep(tensors):
        groups, rows = tensors[DOWN + "scales"].shape
        for name in [name for name in tensors if name.startswith(DOWN)]:
            del tensors[name]
        tensors[DOWN + "weight"] = torch.ones(rows, groups * GROUP, dtype=torch.bfloat16)

    folder, original, _ = copied(case, keep, **block)
    failures = api.verify(folder, original, level="structure").failures
    expected = [DOWN.rstrip(".")] if reader else []
    assert [failure.tensor for failure in failures] == expected
    assert all(f"{reader} looks for its codes" in failure.problem for failure in failures)


@pytest.mark.parametrize("change", ["double", "swap", "flip"])
@pytest.mark.parametrize("case", ["gptq-order", "awq", "compressed-8"])
def test_what_no_right_encoder_writes_is_named(copied, case, change):
    def damage(tensors):
        words = next(n for n in (UP + "qweight", UP + "weight_packed") if n in tensors)
        steps = next(n for n in (UP + "scales", UP + "weight_scale") if n in tensors)
        if change == "double":
            tensors[steps][:2] *= 2
        elif change == "swap":
            tensors[words] = tensors[words].roll(1, 1)
        else:
            tensors[words] = ~tensors[words]

    folder, original, _ = copied(case, damage)
    failures = api.verify(folder, original).failures
    assert {f.tensor for f in failures} <= {UP + "qweight", UP + "weight_packed"}, failures
    assert failures
