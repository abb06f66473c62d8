"""An artifact that fails its own verification lies in OUT.failed; OUT is what it was before."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from qwen35_convert import api, artifact
from qwen35_convert.errors import OutputError, RecipeError
from qwen35_convert.failure import Failure
from qwen35_convert.recipe.recipe import Recipe, read_recipe
from qwen35_convert.verification.logits import LogitsCheck
from qwen35_convert.verification.verdict import verdict
from qwen35_convert.verification.verify import Report
from qwen35_convert.write.failed import failed_of
from tests.checkpoints import dense
from tests.qwen35_convert.command import called

ROOT = Path(__file__).parents[3]
RECEIPT = "qwen35-receipt.json"
UNVERIFIED = api.RunOptions(verify=False)


@pytest.fixture
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("And God said, Let there be light: and there was light. " * 4)
    return str(path)


def gated(text: str, max_kl: float, recipe: str = "fp8-block", *more: str) -> Recipe:
    """Return a recipe of level tensors that states a threshold."""
    return read_recipe(recipe, [f"verify.text={text}", f"verify.max_kl={max_kl}", *more])


def files_of(folder: Path) -> dict[str, bytes]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def names_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def receipt_of(path: Path) -> dict:
    return json.loads(path.read_bytes())


def test_what_fails_its_gate_is_kept_aside_with_the_verdict(tmp_path, nano, text):
    done = api.convert(nano, tmp_path / "out", gated(text, 1e-9))
    assert done.failed
    assert done.out == tmp_path / "out.failed"
    assert names_of(tmp_path) == ["out.failed"]
    receipt = receipt_of(tmp_path / "out.failed" / RECEIPT)
    assert set(receipt["output"]["files"]) == {*names_of(tmp_path / "out.failed")} - {RECEIPT}
    found = receipt["verdict"]
    assert found["passed"] is False
    assert found["level"] == "logits"
    assert found["raised"] == "raised from tensors: verify.max_kl is stated"
    assert found["thresholds"] == {"max_kl": 1e-9, "min_top1": None, "why": "stated"}
    assert found["measured"]["kl_mean"] > 1e-4
    assert found["text_sha256"] == hashlib.sha256(Path(text).read_bytes()).hexdigest()
    (failure,) = found["failures"]
    assert failure["problem"].startswith("mean KL is")
    assert done.report is not None
    assert [f.tensor for f in done.report.failures] == ["logits"]


@pytest.mark.parametrize("against", [True, False], ids=["with its source", "alone"])
def test_what_failed_its_gate_fails_at_a_level_that_does_not_measure_it(
    tmp_path, nano, text, against
):
    failed = api.convert(nano, tmp_path / "out", gated(text, 1e-9)).out
    source = nano if against else None
    for level in ("structure", "tensors"):
        (failure,) = api.verify(failed, source, level=level).failures
        assert "says that the artifact failed at level logits: mean KL is" in failure.problem
        assert failure.problem.endswith("--level logits measures it again")
    again = LogitsCheck(text, max_kl=1.0)
    assert api.verify(failed, nano, logits=again).passed


def test_the_same_command_starts_afresh_and_gives_the_same_bytes(tmp_path, nano, text):
    api.convert(nano, tmp_path / "out", gated(text, 1e-9))
    before = files_of(tmp_path)
    api.convert(nano, tmp_path / "out", gated(text, 1e-9))
    assert files_of(tmp_path) == before
    assert names_of(tmp_path) == ["out.failed"]
    done = api.convert(nano, tmp_path / "out", gated(text, 1.0))
    assert not done.failed
    assert names_of(tmp_path) == ["out", "out.failed"]
    assert before.items() <= files_of(tmp_path).items()


def test_an_old_model_stays_when_the_new_one_fails(tmp_path, nano, text):
    api.convert(nano, tmp_path / "out", "bf16-split", UNVERIFIED)
    before = files_of(tmp_path / "out")
    overwriting = api.RunOptions(overwrite=True)
    done = api.convert(nano, tmp_path / "out", gated(text, 1e-9), overwriting)
    assert done.failed
    assert files_of(tmp_path / "out") == before
    assert names_of(tmp_path) == ["out", "out.failed"]
    assert not api.convert(nano, tmp_path / "out", gated(text, 1.0), overwriting).failed
    assert files_of(tmp_path / "out") != before


def test_files_of_a_gguf_lie_in_a_folder(tmp_path, nano, text):
    sizes = ("export.max_shard_size=1MB", "vision=keep")
    recipe = gated(text, 1e-9, "gguf-q8_0", *sizes)
    done = api.convert(nano, tmp_path / "m.gguf", recipe)
    assert done.out == tmp_path / "m.gguf.failed"
    assert names_of(tmp_path) == ["m.gguf.failed"]
    names = names_of(done.out)
    assert {"m-00001-of-00003.gguf", "mmproj-m.gguf", "m.gguf.receipt.json"} <= {*names}
    assert receipt_of(done.out / "m.gguf.receipt.json")["verdict"]["passed"] is False
    first = next(name for name in names if name.startswith("m-00001"))
    (failure,) = api.verify(done.out / first, nano).failures  # it can be looked at where it lies
    assert "says that the artifact failed at level logits" in failure.problem
    before = files_of(done.out)
    assert api.convert(nano, tmp_path / "m.gguf", recipe).failed
    assert files_of(done.out) == before


def test_a_failure_of_any_kind_keeps_out_away(tmp_path, monkeypatch):
    def failing(*_: object, **__: object) -> Report:
        return Report("tensors", {}, [], {}, [Failure("norm", "differs")], None)

    monkeypatch.setattr(artifact, "verify_shown", failing)
    done = api.convert(dense(tmp_path / "in"), tmp_path / "out", "fp8-block")
    assert done.failed
    assert names_of(tmp_path) == ["in", "out.failed"]
    found = receipt_of(tmp_path / "out.failed" / RECEIPT)["verdict"]
    assert found["failures"] == [{"tensor": "norm", "problem": "differs"}]
    assert found["thresholds"] is None
    assert found["measured"] is None


def test_a_receipt_holds_the_verdict_of_what_passed_and_null_without_one(tmp_path, nano, text):
    recipe = gated(text, 1.0)
    for name in ("one", "two"):
        assert not api.convert(nano, tmp_path / name, recipe).failed
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    found = receipt_of(tmp_path / "one" / RECEIPT)["verdict"]
    assert found["passed"] is True
    assert found["failures"] == []
    measured = found["measured"]
    assert set(measured) == {"kl_mean", "kl_p999", "top1", "ppl_source", "ppl_artifact", "tokens"}
    assert all(float(f"{x:.4g}") == x for x in measured.values())
    api.convert(nano, tmp_path / "three", "fp8-block", UNVERIFIED)
    assert receipt_of(tmp_path / "three" / RECEIPT)["verdict"] is None


def test_measured_values_are_rounded_to_what_equal_machines_agree_on():
    logits = {
        "kl_mean": 0.0123456789,
        "kl_p999": 3e-17,
        "top1": 2 / 3,
        "ppl_source": 57.76499,
        "ppl_artifact": float("inf"),
        "tokens": 123456,
        "limits": {},
        "text_sha256": "",
    }
    measured = verdict(Report("logits", {}, [], {}, [], None, logits))["measured"]
    assert measured == {
        "kl_mean": 0.01235,
        "kl_p999": 0.0,
        "top1": 0.6667,
        "ppl_source": 57.76,
        "ppl_artifact": float("inf"),
        "tokens": 123456,
    }


@pytest.mark.parametrize("what", ["file", "folder", "link", "model"])
def test_what_is_not_ours_at_its_place_is_refused_before_any_work(tmp_path, what):
    source, failed = dense(tmp_path / "in"), failed_of(tmp_path / "out")
    if what == "file":
        failed.write_bytes(b"x")
    elif what == "link":
        (tmp_path / "elsewhere").mkdir()
        failed.symlink_to(tmp_path / "elsewhere")
    elif what == "folder":
        failed.mkdir()
        (failed / "thesis.tex").write_bytes(b"x")
    else:
        api.convert(source, failed, "bf16-split")
    before = files_of(tmp_path)
    with pytest.raises(OutputError, match=r"out\.failed exists, expected nothing"):
        api.convert(source, tmp_path / "out")
    assert files_of(tmp_path) == before
    assert not api.convert(source, tmp_path / "out", options=UNVERIFIED).failed


def test_an_empty_folder_at_its_place_is_taken(tmp_path, nano, text):
    failed_of(tmp_path / "out").mkdir()
    assert api.convert(nano, tmp_path / "out", gated(text, 1e-9)).failed
    assert names_of(tmp_path) == ["out.failed"]


def test_a_failed_artifact_is_not_replaced_while_it_is_the_source(tmp_path, nano, text):
    failed = api.convert(nano, tmp_path / "out", gated(text, 1e-9)).out
    before = files_of(failed)
    with pytest.raises(OutputError, match="holds the source"):
        api.convert(failed, tmp_path / "out", "bf16-split")
    assert files_of(failed) == before


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["verify.max_kl=-1"], "verify.max_kl: Input should be greater than or equal to 0"),
        (["verify.max_kl=.nan"], "verify.max_kl"),
        (["verify.max_kl=.inf"], "verify.max_kl"),
        (["verify.min_top1=1.01"], "verify.min_top1: Input should be less than or equal to 1"),
        (["verify.min_top1=-0.1"], "verify.min_top1"),
        (["verify.min_top1=.nan"], "verify.min_top1"),
        (["verify.max_kl=9e999"], "verify.max_kl"),
        (["verify.max_kl=much"], "verify.max_kl: Input should be a valid number"),
        (["verify.max_kl=0.1", "verify.text=/no/such/text"], "text /no/such/text cannot be read"),
    ],
)
def test_gates_that_cannot_be_are_refused_while_planning(tmp_path, nano, changes, says):
    with pytest.raises(RecipeError, match=says):
        api.convert(nano, tmp_path / "out", "fp8-block", overrides=changes)
    assert names_of(tmp_path) == []


def test_the_commands_exit_with_1_and_say_where_it_lies(tmp_path, nano, text):
    settings = ("--set", f"verify.text={text}", "--set", "verify.max_kl=1e-9")
    done = called("convert", nano, "-o", tmp_path / "out", "--recipe", "fp8-block", *settings)
    assert done.returncode == 1
    where = f"{tmp_path / 'out'} was not written: {tmp_path / 'out.failed'} failed"
    assert where in done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'out.failed'}: ")
    assert "limits      mean KL at most 1e-09 (stated)" in lines
    assert lines[-1] == "FAILED      level logits (raised from tensors: verify.max_kl is stated)"
    assert names_of(tmp_path) == ["out.failed"]
    verify = ("verify", tmp_path / "out.failed", "--against", nano, "--text", text)
    done = called(*verify, "--max-kl", "1e-9")
    assert done.returncode == 1
    assert "FAILED      level logits (raised from tensors: --max-kl is stated)" in done.stdout
    done = called(*verify, "--max-kl", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["raised"] == "raised from tensors: --max-kl is stated"
    assert found["logits"]["limits"] == {"max_kl": 1.0, "min_top1": None, "why": "stated"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--max-kl", "0.1"), "--max-kl is stated) compares with a source"),
        (("--max-kl", "nan"), "--max-kl is nan"),
        (("--against", "nowhere", "--min-top1", "97"), "--min-top1 is 97.0"),
    ],
)
def test_a_misused_threshold_of_verify_exits_with_2(arguments, says):
    done = called("verify", "nowhere", *arguments)
    assert done.returncode == 2, done.stderr
    assert says in done.stderr


@pytest.mark.parametrize("level", ["structure", "tensors"])
@pytest.mark.parametrize("option", ["--text", "--logits-cache"])
def test_what_only_logits_read_is_refused_at_a_lower_level(tmp_path, option, level):
    done = called("verify", "nowhere", option, tmp_path / "text.txt", "--level", level)
    assert done.returncode == 2, done.stderr
    assert f"{option} is for level logits, and this is level {level}" in done.stderr
    assert f"add --level logits, or leave out {option}" in done.stderr
