"""`convert` end to end: what is written, what is refused, and that nothing is half-done."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from formats.errors import FormatError
from formats.family.slots import Form
from quant.errors import QuantError
from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.errors import OutputError, RecipeError
from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.write.out import partial_of
from tests.checkpoints import (
    dense,
    hub_config,
    make_weights,
    moe,
    split_experts,
    text_config,
    write_checkpoint,
)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def config_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())


def test_bf16_split_strips_the_namespace_and_changes_no_byte(tmp_path):
    source = dense(tmp_path / "in", sizes="ragged")
    done = api.convert(source, tmp_path / "out", read_recipe("bf16-split"))
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    text = {
        n.replace("model.language_model.", "model."): t
        for n, t in before.items()
        if not n.startswith("model.visual.")
    }
    assert after.keys() == text.keys()
    for name, value in text.items():
        assert after[name].dtype == value.dtype, name
        assert torch.equal(after[name].view(torch.uint8), value.view(torch.uint8)), name
    assert done.report is not None
    assert done.report.passed
    assert config_of(tmp_path / "out")["architectures"] == ["Qwen3_5ForCausalLM"]


def test_fused_experts_are_split_gate_first(tmp_path):
    source = moe(tmp_path / "in")
    api.convert(source, tmp_path / "out", read_recipe("bf16-split"))
    after = tensors_of(tmp_path / "out")
    clean = split_experts(tensors_of(source))
    for name, value in clean.items():
        if ".experts." in name:
            ours = after[name.replace("model.language_model.", "model.")]
            assert torch.equal(ours, value), name


def test_split_experts_can_be_fused_again(tmp_path):
    config = hub_config(moe=True)
    fused = make_weights(config)
    source = write_checkpoint(tmp_path / "in", config, split_experts(fused))
    api.convert(source, tmp_path / "out", read_recipe("bf16-split", ["experts=fused"]))
    after = tensors_of(tmp_path / "out")
    for name, value in fused.items():
        if "experts" in name.split("."):
            assert torch.equal(after[name.replace("model.language_model.", "model.")], value), name


def test_an_fp8_moe_is_split_and_verifies(tmp_path):
    done = api.convert(moe(tmp_path / "in"), tmp_path / "out", read_recipe("fp8-block"))
    assert done.report is not None
    assert done.report.failures == []
    assert 0 < done.report.schemes["fp8-block"]["relative_rms"] < 2**-4


def test_fused_fp8_experts_are_refused_for_no_loader_decodes_them(tmp_path):
    source = moe(tmp_path / "in")
    with pytest.raises(RecipeError, match="must be split"):
        api.convert(source, tmp_path / "out", read_recipe("fp8-block", ["experts=fused"]))


def test_every_layout_of_one_model_gives_the_same_bytes(tmp_path):
    config = hub_config(moe=True)
    weights = make_weights(config)
    layouts = {
        "hub": (config, weights),
        "split": (config, split_experts(weights)),
        "nested": (
            config,
            {
                n.replace(
                    "model.language_model.",
                    "model.language_model." * 1 + "language_model.language_model.",
                ): t
                for n, t in weights.items()
            },
        ),
        "mlx-names": (
            config,
            {
                n.replace("model.language_model.", "language_model.model."): t
                for n, t in weights.items()
            },
        ),
    }
    outputs = []
    for name, (c, w) in layouts.items():
        source = write_checkpoint(tmp_path / name, c, w)
        api.convert(source, tmp_path / f"{name}-out", read_recipe("fp8-block"))
        files = files_of(tmp_path / f"{name}-out")
        files.pop("qwen35-receipt.json")  # holds the hashes of the differing sources
        files.pop("README.md")  # and this their names
        outputs.append(files)
    assert all(files == outputs[0] for files in outputs)


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-channel", "bf16-split", "fp8-block-hub"])
def test_any_number_of_workers_writes_the_same_bytes_receipt_included(tmp_path, recipe):
    source = moe(tmp_path / "in")
    for workers in (1, 2, 5):
        api.convert(
            source,
            tmp_path / str(workers),
            read_recipe(recipe),
            options=api.RunOptions(workers=workers),
        )
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2") == files_of(tmp_path / "5")


def test_small_shards_hold_everything_once(tmp_path):
    source = dense(tmp_path / "in")
    recipe = read_recipe("fp8-block", ["export.max_shard_size=200KB"])
    api.convert(source, tmp_path / "out", recipe)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files == sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    held = 0
    for file in files:
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                assert index["weight_map"][name] == file
                held += opened.get_tensor(name).nbytes
    assert index["metadata"]["total_size"] == held
    assert type(index["metadata"]["total_size"]) is int


def test_side_files_are_copied_byte_for_byte_and_code_is_not(tmp_path, nano):
    source = tmp_path / "in"
    shutil.copytree(nano, source)
    (source / "modeling_evil.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_bytes(b"\x80\x04")
    api.convert(source, tmp_path / "out", read_recipe("fp8-block"))
    out = files_of(tmp_path / "out")
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "vocab.json",
        "merges.txt",
        "preprocessor_config.json",
        "generation_config.json",
    ):
        assert out[name] == (source / name).read_bytes()
    assert not {"modeling_evil.py", "pytorch_model.bin"} & out.keys()


def test_files_have_ordinary_modes(tmp_path):
    before = os.umask(0o022)
    try:
        api.convert(dense(tmp_path / "in"), tmp_path / "out", read_recipe("fp8-block"))
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {0o644}


def test_fp8_input_is_dequantised_unless_asked(tmp_path):
    api.convert(dense(tmp_path / "in"), tmp_path / "fp8", read_recipe("fp8-block-hub"))
    plain = api.convert(tmp_path / "fp8", tmp_path / "plain")
    assert plain.plan.recipe.name == "bf16-split"
    assert {t.dtype for t in tensors_of(tmp_path / "plain").values()} == {
        torch.bfloat16,
        torch.float32,
    }
    assert "quantization_config" not in config_of(tmp_path / "plain")
    again = api.convert(tmp_path / "fp8", tmp_path / "again", read_recipe("fp8-block"))
    assert any("two roundings" in note for note in again.plan.notes)


def test_quantising_an_fp8_block_artifact_again_changes_nothing(tmp_path):
    """A power-of-two scale is found again from its codes, so the codes are the same."""
    api.convert(dense(tmp_path / "in"), tmp_path / "one", read_recipe("fp8-block"))
    api.convert(tmp_path / "one", tmp_path / "two", read_recipe("fp8-block"))
    one, two = tensors_of(tmp_path / "one"), tensors_of(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[n].view(torch.uint8), two[n].view(torch.uint8)) for n in one)


def test_quantize_keeps_names_and_layout(tmp_path):
    source = dense(tmp_path / "in")
    api.quantize(source, tmp_path / "out", "fp8-block")
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert before.keys() == {n for n in after if not n.endswith("_scale_inv")}
    assert config_of(tmp_path / "out")["architectures"] == config_of(source)["architectures"]


def test_quantize_splits_fused_experts_and_says_so(tmp_path):
    source = moe(tmp_path / "in")
    done = api.quantize(source, tmp_path / "out", "fp8-block")
    names = {n for n in tensors_of(tmp_path / "out") if not n.endswith("_scale_inv")}
    assert names == split_experts(tensors_of(source)).keys()
    assert any("split" in note for note in done.plan.notes)


def test_mtp_and_its_count_agree(tmp_path):
    source = dense(tmp_path / "in")
    api.convert(source, tmp_path / "kept", read_recipe("bf16-split"))
    api.convert(source, tmp_path / "gone", read_recipe("bf16-split", ["mtp=drop"]))
    assert config_of(tmp_path / "kept")["mtp_num_hidden_layers"] == 1
    assert config_of(tmp_path / "gone")["mtp_num_hidden_layers"] == 0
    assert not any(n.startswith("mtp.") for n in tensors_of(tmp_path / "gone"))


def test_a_promised_mtp_that_is_absent_is_written_as_none(tmp_path):
    config = text_config()
    weights = make_weights(config, Form(vision=False, mtp_layers=0), namespace="text")
    source = write_checkpoint(tmp_path / "in", config, weights)
    api.convert(source, tmp_path / "out", read_recipe("fp8-block"))
    assert config_of(tmp_path / "out")["mtp_num_hidden_layers"] == 0


def test_a_tie_flag_is_made_true_in_both_places(tmp_path):
    config = hub_config(tie_word_embeddings=True) | {"tie_word_embeddings": False}
    weights = make_weights(config, Form(head=False))
    source = write_checkpoint(tmp_path / "in", config, weights)
    api.convert(source, tmp_path / "out", read_recipe("fp8-block-hub"))
    written = config_of(tmp_path / "out")
    assert written["tie_word_embeddings"] is True
    assert written["text_config"]["tie_word_embeddings"] is True
    assert "lm_head" in written["quantization_config"]["modules_to_not_convert"]


@pytest.mark.parametrize("recipe", ["fp8-block", "fp8-channel"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(tmp_path, recipe, bad):
    config = hub_config()
    weights = make_weights(config)
    weights["model.language_model.layers.1.mlp.up_proj.weight"][7, 11] = bad
    source = write_checkpoint(tmp_path / "in", config, weights)
    with pytest.raises(QuantError, match=r"layers\.1\.mlp\.up_proj"):
        api.convert(source, tmp_path / "out", read_recipe(recipe))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_a_broken_source_leaves_nothing(tmp_path):
    source = dense(tmp_path / "in")
    os.truncate(source / "model.safetensors", (source / "model.safetensors").stat().st_size - 64)
    with pytest.raises(FormatError, match="64 are missing"):
        api.convert(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_an_out_that_holds_something_is_refused_without_overwrite(tmp_path):
    source = dense(tmp_path / "in")
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(OutputError):
            api.convert(source, out, options=api.RunOptions(overwrite=overwrite))
    assert (out / "thesis.txt").read_text() == "years of work"


def test_overwrite_replaces_a_model(tmp_path):
    source = dense(tmp_path / "in")
    api.convert(source, tmp_path / "out", read_recipe("bf16-split"))
    with pytest.raises(OutputError, match="--overwrite"):
        api.convert(source, tmp_path / "out", read_recipe("fp8-block"))
    api.convert(
        source, tmp_path / "out", read_recipe("fp8-block"), options=api.RunOptions(overwrite=True)
    )
    assert "quantization_config" in config_of(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_overwriting_leaves_the_old_model_or_the_new_one(tmp_path, monkeypatch):
    source, out = dense(tmp_path / "in"), tmp_path / "out"
    api.convert(source, out, read_recipe("bf16-split"))
    (out / "notes").mkdir()
    before = {path.name: path.stat().st_ino for path in out.iterdir()}
    monkeypatch.setattr("qwen35_convert.durable.exchange", lambda *_: False)  # as on NFS
    rename = Path.rename

    def fail(self, target):
        if Path(target) == out and self.name.endswith("partial"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OutputError, match="giving it its name"):
            api.convert(
                source, out, read_recipe("fp8-block"), options=api.RunOptions(overwrite=True)
            )
    assert {path.name: path.stat().st_ino for path in out.iterdir()} == before
    api.convert(source, out, read_recipe("fp8-block"), options=api.RunOptions(overwrite=True))
    assert "quantization_config" in config_of(out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize("out", ["in", "in/out", "."])
def test_an_out_inside_or_around_the_source_is_refused(tmp_path, out):
    source = dense(tmp_path / "in")
    with pytest.raises(OutputError):
        api.convert(source, tmp_path / out, options=api.RunOptions(overwrite=True))
    assert (source / "model.safetensors").is_file()


def test_hub_layout_without_vision_is_refused(tmp_path):
    config = text_config()
    weights = make_weights(config, Form(vision=False), namespace="text")
    source = write_checkpoint(tmp_path / "in", config, weights)
    with pytest.raises(FormatError, match="layout hub"):
        api.convert(source, tmp_path / "out", read_recipe("fp8-block-hub"))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{match: layers.*.linear_attn.in_proj_a, scheme: fp8-block}", "in_proj_a"),
        ("{match: layers.*.nothing, scheme: fp8-block}", "nothing"),
        ("{match: layers.3.self_attn.q_proj, scheme: keep}", "q_proj"),
        ("{match: embed_tokens, scheme: fp8-block}", "embed"),
        ("{match: layers.*, scheme: fp9}", "fp9"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused(tmp_path, rule, message):
    source = dense(tmp_path / "in")
    with pytest.raises(RecipeError, match=message):
        api.convert(
            source, tmp_path / "out", read_recipe("fp8-block", [f"quantize.rules=[{rule}]"])
        )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in"]


def test_a_mixture_of_schemes_is_written_as_compressed_tensors(tmp_path):
    source = dense(tmp_path / "in")
    rule = "quantize.rules=[{match: layers.*.mlp.down_proj, scheme: fp8-channel}]"
    done = api.convert(source, tmp_path / "out", read_recipe("fp8-block", [rule]))
    block = config_of(tmp_path / "out")["quantization_config"]
    assert block["quant_method"] == "compressed-tensors"
    assert set(block["config_groups"]) == {"FP8_BLOCK", "FP8_DYNAMIC"}
    targets = block["config_groups"]["FP8_DYNAMIC"]["targets"]
    assert targets == [f"model.layers.{i}.mlp.down_proj" for i in range(4)]
    assert done.report is not None
    assert done.report.failures == []


def test_shapes_a_loader_cannot_take_stay_bf16_and_the_plan_says_why(tmp_path):
    plan = api.plan(dense(tmp_path / "in", sizes="ragged"), read_recipe("fp8-block"))
    down = next(row for row in plan.items if row.atom.name == "layers.0.mlp.down_proj")
    assert down.scheme.name == "keep"
    assert "128" in down.reason


def test_a_killed_conversion_is_resumed_to_the_same_bytes(tmp_path):
    """SIGKILL, also of what resumes: OUT is never there half-done, the next run completes it."""
    config = hub_config(
        moe=True, num_hidden_layers=8, layer_types=["linear_attention", "full_attention"] * 4
    )
    source = write_checkpoint(tmp_path / "in", config, make_weights(config))
    api.convert(
        source, tmp_path / "clean", read_recipe("fp8-block"), options=api.RunOptions(verify=False)
    )
    out = tmp_path / "out"
    code = (
        "import qwen35_convert.run.items as run, sys, time\n"
        "run.JOURNAL_SECONDS = 0.0\n"
        "inner = run.convert_item\n"
        "def slow(*args):\n"
        "    time.sleep(0.005)\n"
        "    return inner(*args)\n"
        "run.convert_item = slow\n"
        "from qwen35_convert import api, read_recipe\n"
        f"api.convert({str(source)!r}, {str(out)!r}, read_recipe('fp8-block'),"
        " api.RunOptions(workers=1, verify=False))\n"
    )
    journal = partial_of(out) / "journal"
    for finished in (2, 70):
        process = subprocess.Popen([sys.executable, "-c", code])
        while process.poll() is None and lines_of(journal) <= finished:
            time.sleep(0.01)
        process.kill()
        assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"
        assert not out.exists()
    api.convert(source, out, read_recipe("fp8-block"), options=api.RunOptions(verify=False))
    assert files_of(out) == files_of(tmp_path / "clean")
    assert not partial_of(out).exists()


def lines_of(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_an_unfinished_conversion_of_another_recipe_is_not_mixed_in(tmp_path):
    source = dense(tmp_path / "in")
    work = partial_of(tmp_path / "out")
    work.mkdir()
    (work / "journal").write_text("0" * 64 + "\n0\n")
    (work / "model-00001-of-00009.safetensors").write_bytes(b"old")
    with pytest.raises(OutputError, match="unfinished"):
        api.convert(source, tmp_path / "out", read_recipe("fp8-block"))
    api.convert(
        source, tmp_path / "out", read_recipe("fp8-block"), options=api.RunOptions(overwrite=True)
    )
    assert not work.exists()
    assert not (tmp_path / "out" / "model-00001-of-00009.safetensors").exists()


def test_a_second_conversion_into_one_out_is_refused(tmp_path):
    import fcntl

    source = dense(tmp_path / "in")
    work = partial_of(tmp_path / "out")
    work.mkdir()
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another conversion"):
            api.convert(source, tmp_path / "out")


def test_the_receipt_names_every_file_by_its_hash_and_no_path(tmp_path):
    import hashlib

    source = dense(tmp_path / "in")
    api.convert(source, tmp_path / "out", read_recipe("fp8-block"))
    text = (tmp_path / "out" / "qwen35-receipt.json").read_text()
    receipt = json.loads(text)
    for folder, listed in (
        (source, receipt["source"]["files"]),
        (tmp_path / "out", receipt["output"]["files"]),
    ):
        for name, said in listed.items():
            data = (folder / name).read_bytes()
            assert said == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert set(receipt["output"]["files"]) == {p.name for p in (tmp_path / "out").iterdir()} - {
        "qwen35-receipt.json"
    }
    assert str(tmp_path) not in text
    assert receipt["errors"]["fp8-block"]["relative_rms"] > 0


def test_the_order_of_tensors_in_the_source_changes_no_tensor(tmp_path):
    config = hub_config()
    weights = make_weights(config)
    one = write_checkpoint(tmp_path / "one", config, weights)
    two = write_checkpoint(tmp_path / "two", config, weights, shards=5)
    for source in (one, two):
        api.convert(source, source.with_name(source.name + "-out"), read_recipe("fp8-block"))
    first, second = (tensors_of(tmp_path / f"{n}-out") for n in ("one", "two"))
    assert all(torch.equal(first[n].view(torch.uint8), second[n].view(torch.uint8)) for n in first)


def test_a_source_of_f32_and_f16_weights_is_quantised_too(tmp_path):
    config = hub_config()
    weights = {
        n: t.to(torch.float16) if "mlp" in n.split(".") else t.float()
        for n, t in make_weights(config).items()
    }
    source = write_checkpoint(tmp_path / "in", config, weights)
    done = api.convert(source, tmp_path / "out", read_recipe("fp8-block"))
    assert done.report is not None
    assert done.report.failures == []


def test_the_opened_artifact_has_no_problem(tmp_path):
    api.convert(moe(tmp_path / "in"), tmp_path / "out", read_recipe("fp8-channel"))
    assert open_checkpoint(tmp_path / "out").layout.problems == []


def test_a_stray_file_in_the_source_is_reported(tmp_path):
    source = dense(tmp_path / "in")
    save_file({"x": torch.zeros(2)}, source / "consolidated.safetensors")
    plan = api.plan(source, read_recipe("fp8-block"))
    assert any("consolidated.safetensors" in note for note in plan.notes)


def test_a_disk_that_fills_up_is_refused_and_the_work_done_is_kept(tmp_path, monkeypatch):
    source = dense(tmp_path / "in")
    api.convert(source, tmp_path / "clean", read_recipe("fp8-block"))
    writes = 0

    def full(file: int, data: memoryview, offset: int) -> int:
        nonlocal writes
        writes += 1
        if writes > 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data, offset)

    pwrite = os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OutputError, match="No space left") as caught:
            api.convert(
                source,
                tmp_path / "out",
                read_recipe("fp8-block"),
                options=api.RunOptions(workers=1),
            )
    assert str(partial_of(tmp_path / "out")) in caught.value.left
    assert not (tmp_path / "out").exists()
    api.convert(source, tmp_path / "out", read_recipe("fp8-block"))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "clean")


def test_a_slice_holds_what_its_glob_names_and_is_compared(tmp_path):
    source, out = moe(tmp_path / "in"), tmp_path / "out"
    recipe = read_recipe("fp8-block", ("only='layers.1.mlp.experts.*'",))
    done = api.convert(source, out, recipe)
    assert done.report is not None
    assert done.report.passed
    assert len(done.report.tensors) == 3 * 4
    stored = {n for n in open_checkpoint(out).where if not n.endswith("_scale_inv")}
    assert {name.split(".experts.")[0] for name in stored} == {"model.layers.1.mlp"}
    assert done.plan.dropped["all but what --only names"] > 0


def test_a_slice_of_nothing_is_refused(tmp_path):
    source = moe(tmp_path / "in")
    with pytest.raises(RecipeError, match="names no tensor"):
        api.convert(source, tmp_path / "out", read_recipe("fp8-block", ("only=layers.77.*",)))
