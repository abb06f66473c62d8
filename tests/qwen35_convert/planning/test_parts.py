"""What a recipe drops need not be whole; what it keeps must be, and the refusal names the flag."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import qwen35_convert as q
from formats.errors import FormatError
from qwen35_convert import api
from qwen35_convert.recipe.choice import quantize_recipe
from qwen35_convert.text.generation import Prompt
from tests.checkpoints import Weights, hub_config, make_weights, split_experts, write_checkpoint
from tests.formats.layouts import P, without

UNPROVEN = q.RunOptions(verify=False)
NO_MTP, NO_VISION = "mtp=drop", "layout=text"


def as_it_is(weights: Weights) -> Weights:
    return weights


def without_the_merger(weights: Weights) -> Weights:
    return without(weights, "model.visual.merger.")


def a_transposed_tower(weights: Weights) -> Weights:
    name = "model.visual.blocks.0.attn.qkv.weight"
    return weights | {name: weights[name].T}


def without_a_norm_of_mtp(weights: Weights) -> Weights:
    return without(weights, "mtp.norm.")


def an_expert_more_in_mtp(weights: Weights) -> Weights:
    apart = split_experts(weights)
    first = [n for n in apart if n.startswith("mtp.layers.0.mlp.experts.0.")]
    return apart | {n.replace("experts.0.", "experts.4."): apart[n] for n in first}


def fused_experts_of_a_whole_mtp(weights: Weights) -> Weights:
    names = [n for n in weights if n.startswith("mtp.layers.0.mlp.experts.")]
    return weights | {n: torch.cat([weights[n], weights[n]]) for n in names}


def an_embedding_of_its_own(weights: Weights) -> Weights:
    own = weights["model.language_model.embed_tokens.weight"].clone()
    own[200, 3] = 1.5
    return weights | {"mtp.embed_tokens.weight": own}


def a_packed_linear_in_mtp(weights: Weights) -> Weights:
    gone = without(weights, "mtp.layers.0.self_attn.q_proj.")
    return gone | {"mtp.layers.0.self_attn.q_proj.qweight": torch.zeros(4, 4, dtype=torch.int32)}


CASES = {
    without_the_merger: (NO_VISION, "visual.merger.norm.weight is missing"),
    a_transposed_tower: (NO_VISION, "it is transposed"),
    without_a_norm_of_mtp: (NO_MTP, "mtp.norm.weight is missing"),
    an_expert_more_in_mtp: (NO_MTP, "is expert 4, but text_config.num_experts is 4"),
    fused_experts_of_a_whole_mtp: (NO_MTP, "num_experts 4"),
    an_embedding_of_its_own: (NO_MTP, "they differ in row 200"),
    a_packed_linear_in_mtp: (NO_MTP, "has no qzeros beside it"),
}
MOE = (an_expert_more_in_mtp, fused_experts_of_a_whole_mtp)


def source(folder: Path, change, *, moe: bool) -> Path:
    config = hub_config(moe=moe)
    return write_checkpoint(folder, config, change(make_weights(config)))


def weights_of(folder: Path) -> Weights:
    return load_file(folder / "model.safetensors")


def assert_same(one: Weights, other: Weights) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[n].view(torch.uint8), other[n].view(torch.uint8)) for n in one)


@pytest.mark.parametrize("change", CASES, ids=lambda change: change.__name__)
def test_a_part_that_is_dropped_need_not_be_whole(change, tmp_path):
    """The artifact is that of the untouched model, to the byte."""
    flag, _ = CASES[change]
    made = {}
    for name, harm in (("good", as_it_is), ("harmed", change)):
        folder = source(tmp_path / name, harm, moe=change in MOE)
        done = q.convert(folder, tmp_path / f"{name}-out", "fp8-block", overrides=[flag])
        assert done.report.passed, done.report.failures
        assert q.verify(done.out, folder).passed
        made[name] = done
    assert_same(*(weights_of(done.out) for done in made.values()))
    assert made["good"].plan.notes == ()
    part = "mtp" if flag == NO_MTP else "vision"
    whole = change is an_embedding_of_its_own
    assert (
        any(f"{part} is dropped, and is incomplete" in n for n in made["harmed"].plan.notes)
        != whole
    )


@pytest.mark.parametrize("change", CASES, ids=lambda change: change.__name__)
def test_a_part_that_is_kept_must_be_whole_and_the_refusal_says_how_to_drop_it(change, tmp_path):
    flag, said = CASES[change]
    folder = source(tmp_path / "in", change, moe=change in MOE)
    with pytest.raises(FormatError) as refused:
        q.convert(folder, tmp_path / "out", "fp8-block-hub")
    assert said in str(refused.value)
    way_out = "--set layout=text --set vision=drop" if flag == NO_VISION else "--set mtp=drop"
    assert way_out in str(refused.value)
    assert refused.value.exit_code == 3
    assert not (tmp_path / "out").exists()
    words = way_out.replace("--set ", "").split()
    assert q.plan(folder, "fp8-block-hub", tmp_path / "out", overrides=words).dropped


def test_copies_of_the_embedding_beside_mtp_are_left_out(tmp_path):
    def copied(weights: Weights) -> Weights:
        embed = weights["model.language_model.embed_tokens.weight"]
        head = weights["lm_head.weight"]
        return weights | {"mtp.embed_tokens.weight": embed, "mtp.lm_head.weight": head}

    good = source(tmp_path / "good", as_it_is, moe=False)
    twice = source(tmp_path / "twice", copied, moe=False)
    config = json.loads((twice / "config.json").read_text())
    config["text_config"]["mtp_use_dedicated_embeddings"] = True
    (twice / "config.json").write_text(json.dumps(config))
    outs = [
        q.convert(folder, tmp_path / f"{folder.name}-out", "bf16-split") for folder in (good, twice)
    ]
    assert all(done.report.passed for done in outs)
    assert_same(*(weights_of(done.out) for done in outs))
    written = json.loads((outs[1].out / "config.json").read_text())
    assert written["mtp_num_hidden_layers"] == 1
    assert written["mtp_use_dedicated_embeddings"] is False


def test_an_artifact_must_not_hold_what_a_conversion_would_rename_or_leave_out(tmp_path):
    """No engine finds a tensor under a wrapper, or has a place for a buffer or a copy."""
    out = q.convert(
        source(tmp_path / "in", as_it_is, moe=False), tmp_path / "out", "bf16-split"
    ).out
    (out / "qwen35-receipt.json").unlink()
    (out / "model.safetensors.index.json").unlink()
    weights = weights_of(out)
    extra = {"model.rotary_emb.inv_freq": torch.zeros(8)}
    extra["mtp.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    wrapped = {f"_orig_mod.{name}": w for name, w in (weights | extra).items()}
    save_file(wrapped, out / "model.safetensors", metadata={"format": "pt"})
    said = {f.tensor: f.problem for f in q.verify(out, level="structure").failures}
    assert "is a buffer" in said.pop("_orig_mod.model.rotary_emb.inv_freq")
    assert "not a tensor of the Qwen3.5 family" in said.pop("_orig_mod.mtp.embed_tokens.weight")
    text = f"is under _orig_mod, and so do {len(wrapped) - 1} others"
    assert any(text in problem for problem in said.values())


def harmed(nano: Path, folder: Path, *starts: str) -> Path:
    """Return a copy of the bundled model without some tensors."""
    weights = {n: w for file in nano.glob("*.safetensors") for n, w in load_file(file).items()}
    write_checkpoint(
        folder, json.loads((nano / "config.json").read_text()), without(weights, *starts)
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((nano / name).read_bytes())
    return folder


def said(folder: Path, **changes: bool) -> str:
    return "".join(api.run_text(folder, Prompt("In the beginning", max_tokens=4, **changes)))


def test_a_gguf_refusal_names_the_flag_of_gguf(nano, tmp_path):
    folder = harmed(nano, tmp_path / "in", "model.visual.merger.")
    with pytest.raises(FormatError, match=r"; or leave it out: --set vision=drop\n"):
        q.plan(folder, "gguf-q8_0", tmp_path / "m.gguf", overrides=["vision=keep"])
    assert q.plan(folder, "gguf-q8_0", tmp_path / "m.gguf").dropped["vision"] > 0


def test_what_is_not_run_need_not_be_whole(nano, tmp_path):
    folder = harmed(nano, tmp_path / "in", "model.visual.merger.", "mtp.norm.")
    assert said(folder) == said(nano)
    with pytest.raises(q.Qwen35Error, match="MTP"):
        said(folder, speculate=True)


def test_quantize_drops_vision_when_told_to(tmp_path):
    """Names stay as they are, but the hub's class names a vision tower."""
    folder = source(tmp_path / "in", as_it_is, moe=False)
    plan = q.plan(folder, quantize_recipe("fp8-block", ["vision=drop"]), tmp_path / "out")
    assert not any("visual" in name for name in plan.tensors)
    assert "model.embed_tokens.weight" in plan.tensors


def test_faults_of_one_cause_are_told_once_with_a_count(tmp_path):
    def no_layer_two(weights: Weights) -> Weights:
        return without(weights, "model.language_model.layers.2.")

    folder = source(tmp_path / "in", no_layer_two, moe=False)
    with pytest.raises(FormatError) as refused:
        q.convert(folder, tmp_path / "out", "bf16-split", UNPROVEN)
    text = str(refused.value)
    assert text.count("is missing") == text.count("  fix   ") == 1
    assert f"  and   13 more: {P}layers.2.post_attention_layernorm.weight, " in text
    assert "download" not in text
