"""`verify --level logits`: an artifact is itself to the last digit, and a fault is placed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from formats.errors import FormatError
from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.errors import RecipeError
from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.text.tokens import DEFAULT_TEXT
from qwen35_convert.verification import shown
from qwen35_convert.verification.limits import LOOSEST
from qwen35_convert.verification.logits import LogitsCheck, token_rows
from qwen35_convert.verification.verify import Report
from qwen35_convert.write.receipt import dump_json
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.qwen35_convert.verification.damage import damage

TEXT = DEFAULT_TEXT.read_text()[:3000]


@pytest.fixture
def text(tmp_path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


def verify(source: Path, out: Path, text: str, **thresholds) -> Report:
    check = LogitsCheck(text, **thresholds)
    return api.verify(out, source, level="logits", logits=check)


def entry_of_error(report: Report) -> int:
    """Return the first layer after which the streams differ at all."""
    assert report.logits is not None
    layers = report.logits["layers"]
    return next(layer["layer"] for layer in layers if layer["relative_error"] > 1e-6)


def test_a_lossless_artifact_predicts_exactly_what_its_source_does(tmp_path, nano, text):
    api.convert(nano, tmp_path / "out", read_recipe("bf16-split"))
    report = verify(nano, tmp_path / "out", text, max_kl=1e-9, min_top1=1.0)
    assert report.failures == []
    assert report.logits is not None
    assert report.logits["kl_mean"] <= 1e-9
    assert report.logits["ppl_source"] == report.logits["ppl_artifact"]
    assert all(layer["relative_error"] == 0 for layer in report.logits["layers"])


def test_fp8_costs_a_little_and_the_table_shows_where(tmp_path, nano, text):
    api.convert(nano, tmp_path / "out", read_recipe("fp8-block"))
    report = verify(nano, tmp_path / "out", text)
    assert report.failures == []
    assert report.logits is not None
    assert 1e-6 < report.logits["kl_mean"] < 0.05
    errors = [layer["relative_error"] for layer in report.logits["layers"]]
    assert len(errors) == 4
    assert all(0.001 < error < 0.2 for error in errors)


def test_thresholds_that_are_not_met_fail_and_say_by_how_much(tmp_path, nano, text):
    api.convert(nano, tmp_path / "out", read_recipe("fp8-block"))
    report = verify(nano, tmp_path / "out", text, max_kl=1e-6, min_top1=1.0)
    problems = [f.problem for f in report.failures if f.tensor == "logits"]
    assert any("mean KL is" in p and "expected at most 1e-06" in p for p in problems)
    assert any("top-1 agreement is" in p and "expected at least 1.0" in p for p in problems)
    assert all("(stated)" in p for p in problems if "mean KL" in p)


def test_a_recipe_can_ask_for_thresholds(tmp_path, nano, text):
    ask = [f"verify={{level: logits, text: {text}, max_kl: 0.000001}}"]
    done = api.convert(nano, tmp_path / "out", read_recipe("fp8-block", ask))
    assert done.report is not None
    assert not done.report.passed
    assert done.failed
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.failed" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("thresholds", "keys"),
    [({"max_kl": 1e-9}, "--max-kl is"), ({"max_kl": 1.0, "min_top1": 1.0}, "--max-kl and --min")],
)
def test_a_stated_threshold_is_measured_at_every_level(tmp_path, nano, text, thresholds, keys):
    api.convert(nano, tmp_path / "out", read_recipe("fp8-block"))
    for level in ("structure", "tensors"):
        check = LogitsCheck(text, **thresholds)
        report = api.verify(tmp_path / "out", nano, level=level, logits=check)
        assert not report.passed
        assert {failure.tensor for failure in report.failures} == {"logits"}
        assert report.level == "logits"
        assert report.raised is not None
        assert report.raised.startswith(f"raised from {level}: {keys}")


def test_a_model_of_zeros_fails_the_default_limit(tmp_path, nano, text):
    def empty(weights):
        for name, weight in weights.items():
            if "norm" not in name:
                weights[name] = torch.zeros_like(weight)

    api.convert(nano, tmp_path / "out", read_recipe("fp8-block"))
    good = verify(nano, tmp_path / "out", text)
    assert good.failures == []
    assert good.logits is not None
    assert good.logits["limits"] == {
        "max_kl": 0.044,
        "min_top1": None,
        "why": "default for fp8-block",
    }
    damage(tmp_path / "out", empty)
    report = verify(nano, tmp_path / "out", text)
    assert report.logits is not None
    assert report.logits["kl_mean"] > 3 > LOOSEST, "also under the loosest limit"
    (problem,) = [f.problem for f in report.failures if f.tensor == "logits"]
    assert "expected at most 0.044 (default for fp8-block)" in problem


def test_nan_meets_no_threshold_and_its_layer_is_named(tmp_path, nano, text):
    def spoil(weights):
        weights["model.layers.2.post_attention_layernorm.weight"][3] = torch.nan

    api.convert(nano, tmp_path / "out", read_recipe("fp8-block"))
    damage(tmp_path / "out", spoil)
    report = verify(nano, tmp_path / "out", text, max_kl=1e9, min_top1=0.0001)
    problems = {f.problem for f in report.failures if f.tensor == "logits"}
    where = "; the error is not finite from layer 2 (linear_attention)"
    assert problems == {
        f"mean KL is nan, expected at most 1e+09 (stated){where}",
        f"top-1 agreement is 0.0000, expected at least 0.0001{where}",
    }
    assert any("post_attention_layernorm" in f.tensor for f in report.failures)
    written = json.loads(dump_json(report.as_dict()), parse_constant=pytest.fail)
    assert written["logits"]["kl_mean"] is None


def test_nan_on_both_sides_agrees_with_nothing(tmp_path, nano, text):
    def spoil(weights):
        weights["model.norm.weight"][3] = torch.nan

    api.convert(nano, tmp_path / "out", read_recipe("bf16-split"))
    damage(tmp_path / "out", spoil)
    source = tmp_path / "out"
    report = verify(source, source, text)
    assert report.logits is not None
    assert report.logits["top1"] == 0
    assert any("mean KL is nan" in f.problem for f in report.failures)


def test_logits_that_cannot_be_measured_are_a_failure(tmp_path, nano, text):
    api.convert(nano, tmp_path / "out", read_recipe("bf16-split"))
    damage(tmp_path / "out", lambda weights: weights.pop("model.norm.weight"))
    (tmp_path / "out" / "model.safetensors.index.json").unlink(missing_ok=True)
    report = verify(nano, tmp_path / "out", text)
    assert ("logits", "were not measured: the artifact has problems") in {
        (f.tensor, f.problem) for f in report.failures
    }


def test_a_slice_cannot_be_gated_by_logits(tmp_path, nano):
    settings = ["only='layers.0.*'", "verify.max_kl=0.1"]
    with pytest.raises(RecipeError, match=r"raised from tensors: verify\.max_kl is stated"):
        api.convert(nano, tmp_path / "out", "fp8-block", overrides=settings)
    assert list(tmp_path.iterdir()) == []


def test_a_shifted_norm_is_placed_in_its_layer(tmp_path, nano, text):
    def shift(weights):
        weights["model.layers.2.post_attention_layernorm.weight"] += 1

    api.convert(nano, tmp_path / "out", read_recipe("bf16-split"))
    damage(tmp_path / "out", shift)
    report = verify(nano, tmp_path / "out", text, max_kl=1e-3)
    assert not report.passed
    assert any("in layer 2 (linear_attention)" in f.problem for f in report.failures)
    assert entry_of_error(report) == 2


def test_tiled_value_heads_are_placed_in_their_layer(tmp_path, nano, text):
    def tile(weights):
        for part in ("in_proj_z.weight", "in_proj_a.weight", "A_log"):
            name = f"model.layers.1.linear_attn.{part}"
            heads = weights[name].reshape(2, -1, *weights[name].shape[1:])
            weights[name] = heads.flip(0).reshape(weights[name].shape)

    api.convert(nano, tmp_path / "out", read_recipe("bf16-split"))
    damage(tmp_path / "out", tile)
    report = verify(nano, tmp_path / "out", text, max_kl=1e-3)
    assert any(f.tensor == "logits" for f in report.failures)
    assert entry_of_error(report) == 1


def test_a_swapped_expert_is_placed_in_its_layer(tmp_path, nano, text):
    def swap(weights):
        one, two = (f"model.layers.3.mlp.experts.{e}.down_proj.weight" for e in (0, 1))
        weights[one], weights[two] = weights[two].clone(), weights[one].clone()

    config = hub_config(moe=True, vocab_size=2048)
    source = write_checkpoint(tmp_path / "in", config, make_weights(config))
    shutil.copy(nano / "tokenizer.json", source)
    api.convert(source, tmp_path / "out", read_recipe("bf16-split"))
    damage(tmp_path / "out", swap)
    report = verify(source, tmp_path / "out", text)
    assert any("holds the values of layers.3.mlp.experts" in f.problem for f in report.failures)
    assert entry_of_error(report) == 3


def test_logits_need_a_source(nano):
    with pytest.raises(RecipeError, match="--against"):
        api.verify(nano, level="logits")
    with pytest.raises(RecipeError, match=r"--min-top1 is stated.*--against"):
        api.verify("nowhere", logits=LogitsCheck(min_top1=0.5))


@pytest.mark.parametrize(
    ("thresholds", "says"),
    [
        ({"max_kl": float("nan")}, "--max-kl is nan"),
        ({"max_kl": float("inf")}, "--max-kl is inf"),
        ({"max_kl": -0.1}, "--max-kl is -0.1"),
        ({"min_top1": float("nan")}, "--min-top1 is nan"),
        ({"min_top1": -0.5}, "--min-top1 is -0.5"),
        ({"min_top1": 97}, "--min-top1 is 97, expected a share, 0 to 1"),
    ],
)
def test_a_threshold_that_cannot_be_is_refused(thresholds, says):
    with pytest.raises(RecipeError, match=says):
        LogitsCheck(**thresholds)


def test_verify_reads_the_text_before_any_work(tmp_path, nano, monkeypatch):
    monkeypatch.setattr(shown, "verify_shown", None)
    with pytest.raises(RecipeError, match="cannot be read"):
        verify(nano, nano, str(tmp_path / "missing"))


def test_a_tokenizer_beyond_the_vocabulary_is_refused_while_planning(tmp_path, nano):
    config = hub_config(vocab_size=256)
    source = write_checkpoint(tmp_path / "in", config, make_weights(config))
    shutil.copy(nano / "tokenizer.json", source)
    with pytest.raises(FormatError, match="but the vocabulary has 256"):
        api.convert(source, tmp_path / "out", "fp8-block", overrides=["verify.level=logits"])
    assert not (tmp_path / "out").exists()


def test_an_unknown_level_is_refused(nano):
    with pytest.raises(RecipeError, match="expected structure, tensors or logits"):
        api.verify(nano, nano, level="vibes")


def test_rows_of_text_hold_its_first_tokens(nano, tmp_path):
    rows = token_rows(open_checkpoint(nano), "default")
    assert rows.shape == (16, 512)
    assert rows.dtype == torch.int64
    short = tmp_path / "short.txt"
    short.write_text("And God said")
    assert token_rows(open_checkpoint(nano), str(short)).shape[0] == 1


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", None])
def test_a_text_that_is_none_is_refused(nano, tmp_path, content):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match="text"):
        token_rows(open_checkpoint(nano), str(path))


def test_the_report_holds_the_logits_as_json(tmp_path, nano, text):
    api.convert(nano, tmp_path / "out", read_recipe("fp8-block"))
    report = json.loads(json.dumps(verify(nano, tmp_path / "out", text).as_dict()))
    assert {"kl_mean", "kl_p999", "top1", "ppl_source", "ppl_artifact", "tokens"} <= set(
        report["logits"]
    )


@pytest.mark.parametrize("receipt", [True, False])
def test_comparing_tensors_first_leaves_torch_its_threads(tmp_path, nano, receipt):
    out, before = tmp_path / "out", torch.get_num_threads()
    api.convert(nano, out, recipe="fp8-block")
    if not receipt:
        (out / "qwen35-receipt.json").unlink()
    torch.set_num_threads(2)
    try:
        assert api.verify(out, nano, level="tensors").passed
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
