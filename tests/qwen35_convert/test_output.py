"""Results and errors for machines: JSON with its version, GitHub's annotations, JUnit's XML."""

from __future__ import annotations

import json
import os
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest

from qwen35_convert import github
from qwen35_convert.errors import Place
from qwen35_convert.failure import Failure
from qwen35_convert.junit import Case, Results, of_report
from qwen35_convert.verification.table import CHECKS
from qwen35_convert.verification.verify import Report
from tests.checkpoints import dense
from tests.qwen35_convert.command import called as qwen35
from tests.qwen35_convert.command import qwen35 as in_a_process

WRONG = "layuot: text\nmtp: no\n"


@pytest.fixture(scope="module")
def artifact(nano_path, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("artifact") / "out"
    done = qwen35("convert", nano_path, "-o", out, "--junit", out.parent / "in/a/junit.xml", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    return out


@pytest.fixture(scope="module")
def other(tmp_path_factory) -> Path:
    return dense(tmp_path_factory.mktemp("other") / "in")


def suites(path: Path) -> dict[str, dict[str, Xml.Element]]:
    """Return the test cases of a file by suite and name; the counts must be those of the cases."""
    root = Xml.parse(path).getroot()
    found = {}
    for suite in root:
        cases = {case.get("name"): case for case in suite}
        for kind in ("failure", "error", "skipped"):
            count = sum(case.find(kind) is not None for case in cases.values())
            assert suite.get({"failure": "failures", "error": "errors"}.get(kind, kind)) == str(
                count
            )
        assert suite.get("tests") == str(len(cases))
        found[suite.get("name")] = cases
    return found


def test_a_conversion_is_a_test_case_beside_its_checks(artifact):
    found = suites(artifact.parent / "in/a/junit.xml")
    assert list(found) == ["convert", "structure", "tensors"]
    assert list(found["convert"]) == ["convert"]
    checks = {check.id for check in CHECKS if check.level in ("structure", "tensors")}
    assert {*found["structure"], *found["tensors"]} == checks | {"opening"}
    assert found["tensors"]["bytes"].get("classname") == f"{artifact}.tensors"
    assert found["tensors"]["values"].find("skipped") is not None


def test_checks_that_fail_are_test_cases_that_fail(artifact, other, tmp_path):
    path = tmp_path / "junit.xml"
    done = qwen35("verify", artifact, "--against", other, "--junit", path, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["schema_version"] == 1
    failed = {check: count for check, count in found["checks"].items() if count}
    assert failed
    cases = {name: case for suite in suites(path).values() for name, case in suite.items()}
    with_failures = {name for name, case in cases.items() if case.find("failure") is not None}
    assert with_failures == set(failed)
    tensor = found["failures"][0]["tensor"]
    assert any(tensor in cases[name].find("failure").text for name in failed)


def test_an_error_is_json_on_stdout_and_a_block_on_stderr(tmp_path):
    path = tmp_path / "new/junit.xml"
    done = qwen35("convert", "nowhere", "-o", tmp_path / "x", "--json", "--junit", path)
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert (error["kind"], error["exit_code"], error["left"]) == ("input", 3, "nothing was written")
    assert done.stderr == f"qwen35: {error['message']}\n  left  nothing was written\n"
    (case,) = suites(path)["convert"].values()
    assert case.find("error").get("message") == error["message"].split("\n")[0]


@pytest.mark.parametrize(
    ("arguments", "code", "kind"),
    [
        (["verify", "x", "--level", "tensor", "--json"], 2, "misused"),
        (["verify", "x", "--levle", "tensors", "--json"], 2, "misused"),
        (["convert", "--output-format", "json"], 2, "misused"),
        (["convert", "--output-format=json", "--junit"], 2, "misused"),
        (["inspect", "nowhere", "--json"], 3, "input"),
        (["bench", "SOURCE", "--json"], 5, "machine"),
        (["convert", "SOURCE", "-o", "SOURCE", "--json"], 4, "output"),
    ],
)
def test_every_kind_of_error_is_json(arguments, code, kind, other):
    import torch

    if code == 5 and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = qwen35(*[str(other) if a == "SOURCE" else a for a in arguments])
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)
    assert found["schema_version"] == 1
    assert (found["error"]["kind"], found["error"]["exit_code"]) == (kind, code)
    assert found["error"]["message"] in done.stderr
    assert "Traceback" not in done.stderr


def test_a_recipe_is_checked_in_every_form(tmp_path):
    name = tmp_path / "mine.yaml"
    name.write_text(WRONG)
    text = qwen35("recipes", "--check", name)
    first, second = text.stdout.splitlines()
    assert text.returncode == 2
    assert first == f"{name}:1:1: there is no key 'layuot', did you mean 'layout'?"
    assert second.startswith(f"{name}:2:6: mtp: Input should be 'keep' or 'drop'")
    found = json.loads(qwen35("recipes", "--check", name, "--json").stdout)["mistakes"]
    assert [(one["file"], one["line"], one["column"]) for one in found] == [
        (str(name), 1, 1),
        (str(name), 2, 6),
    ]
    path = tmp_path / "junit.xml"
    shown = qwen35("recipes", "--check", name, "--output-format", "github", "--junit", path)
    assert [line.split("::")[1] for line in shown.stdout.splitlines()] == [
        f"error file={name},line=1,col=1,title=recipe",
        f"error file={name},line=2,col=6,title=recipe",
    ]
    assert suites(path)["recipe"][str(name)].find("failure").text == text.stdout.rstrip("\n")


def test_a_right_recipe_has_no_mistakes(tmp_path):
    name = tmp_path / "mine.yaml"
    name.write_text("extends: fp8-block\n")
    done = qwen35("recipes", "--check", name)
    assert (done.returncode, done.stdout) == (0, f"{name}: no mistakes\n")
    assert json.loads(qwen35("recipes", "--check", name, "--json").stdout)["mistakes"] == []


def test_a_wrong_recipe_of_a_conversion_is_annotated_in_its_lines(tmp_path, other):
    name = tmp_path / "mine.yaml"
    name.write_text(WRONG)
    arguments = ["convert", other, "-o", tmp_path / "x", "--recipe", name]
    done = qwen35(*arguments, "--output-format", "github")
    assert done.returncode == 2
    assert [line.split(",title")[0] for line in done.stdout.splitlines()] == [
        f"::error file={name},line=1,col=1",
        f"::error file={name},line=2,col=6",
    ]


def test_failures_are_annotations_and_the_report_cannot_be_one(artifact, other):
    done = qwen35("verify", artifact, "--against", other, "--output-format", "github")
    assert done.returncode == 1
    fence, *lines = done.stdout.splitlines()
    word = fence.removeprefix("::stop-commands::")
    end = lines.index(f"::{word}::")
    assert any(line.startswith("FAILED") for line in lines[:end])
    assert lines[end + 1 :]
    assert all(line.startswith("::error title=") for line in lines[end + 1 :])
    assert len(lines[end + 1 :]) <= github.MOST


def test_an_annotation_escapes_what_would_end_it():
    line = github.annotation("error", "a,b:c%", "50 %\r\n::warning::", Place("x,y.yaml", 1, 2))
    assert line == (
        "::error file=x%2Cy.yaml,line=1,col=2,title=a%2Cb%3Ac%25::50 %25%0D%0A::warning::"
    )


def test_annotations_that_a_step_cannot_show_are_counted():
    lines = github.several("error", [(str(i), "wrong", github.NOWHERE) for i in range(25)])
    assert len(lines) == 10
    assert lines[-1] == ("::error title=qwen35::and 16 more, which the log and --junit list")
    assert len(github.several("error", [("a", "b", github.NOWHERE)] * 10)) == 10
    assert github.several("error", []) == []


def test_xml_holds_any_name():
    """Names in a checkpoint may hold what XML cannot."""
    name = 'a\0b\ud800<c>&"\x1b'
    xml = Results("verify", name, [Case("tensors", name, [name, "x" * 9], name, "")]).xml()
    (suite,) = Xml.fromstring(xml)
    assert suite[0].get("name") == 'a\ufffdb\ufffd<c>&"\ufffd'


def test_a_failure_of_no_check_is_a_case_too():
    """Such as a receipt that cannot be read: what the checks would need is not there."""
    lost = Failure("qwen35-receipt.json", "is not JSON")
    report = Report("structure", {}, [], {}, [lost], None, checks={"opening": [lost], "census": []})
    opening, census, *rest = of_report(report)
    assert (opening.name, opening.failures) == ("opening", ["qwen35-receipt.json: is not JSON"])
    assert (census.name, census.failures, census.skipped) == ("census", [], "")
    assert all(case.skipped for case in rest)


def test_json_and_another_form_exclude_each_other(other, tmp_path):
    done = qwen35("verify", other, "--json", "--output-format", "github")
    assert done.returncode == 2
    assert "--json excludes --output-format github" in done.stderr
    done = qwen35("verify", other, "--output-format", "jsn")
    assert done.returncode == 2
    assert "expected text, json or github, did you mean 'json'?" in done.stderr
    done = qwen35("verify", other, "--junit", other)
    assert done.returncode == 4
    assert done.stderr.count(f"--junit {other} cannot be written: Is a directory") == 1


def test_names_that_no_encoding_has_are_told_in_every_form(tmp_path):
    """Half a surrogate pair: JSON can escape it, so a header may hold it; a path may be bytes."""
    missing = os.fsdecode(bytes(tmp_path) + b"/\xff")
    done = in_a_process("inspect", missing, "--json")
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)
    assert missing in json.loads(done.stdout)["error"]["message"]
    assert "\\udcff" in done.stderr
    done = in_a_process("verify", missing, "--output-format", "github")
    assert done.returncode == 3
    assert done.stdout.startswith("::error title=qwen35 verify::")
