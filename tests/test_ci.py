"""docs/ci.md is followed to the letter: its workflow's steps are run one by one, on this machine.

Stand-ins: actions/checkout puts a link to this repository where it is told to, setup-python checks
the version, upload-artifact looks for the files, and pip installs without the dependencies, which
are here. The source is the bundled model.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
import yaml

from qwen35_convert.recipe.recipe import read_recipe
from tests.qwen35_convert.command import ROOT, called

PAGE = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
YAML = [text for kind, text in BLOCKS if kind == "yaml"]
RECIPE, WORKFLOW, EDITOR = YAML
JOB = yaml.safe_load(WORKFLOW)["jobs"]["quantize"]
ENVIRONMENT = yaml.safe_load(WORKFLOW)["env"]
PIP = """#!/bin/sh
test "$1" = install && shift
exec {python} -m pip install --quiet --no-deps --no-build-isolation --no-index --target {site} "$@"
"""


@dataclass
class Runner:
    """A machine of GitHub's, in a folder."""

    folder: Path
    source: Path
    log: dict[str, subprocess.CompletedProcess[str]] = field(default_factory=dict)
    kept: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.workspace.mkdir()
        (self.folder / "bin").mkdir()
        pip = self.folder / "bin" / "pip"
        pip.write_text(PIP.format(python=sys.executable, site=self.folder / "site"))
        pip.chmod(0o755)

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    def step(self, step: dict[str, Any]) -> int:
        """Do one step; return its exit code."""
        if "run" in step:
            self.log[step["name"]] = done = self.shell(step["run"])
            return done.returncode
        action, _ = step["uses"].split("@")
        ACTIONS[action](self, **step.get("with", {}))
        return 0

    def shell(self, command: str) -> subprocess.CompletedProcess[str]:
        """Run a command as GitHub does: `bash -e`."""
        site = self.folder / "site"
        path = f"{self.folder / 'bin'}:{site / 'bin'}:{os.environ['PATH']}"
        environment = os.environ | ENVIRONMENT | {"PATH": path, "PYTHONPATH": str(site)}
        return subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=self.workspace,
            env=environment | {"SOURCE": str(self.source), "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )

    def checkout(self, repository: str | None = None, path: str = "") -> None:
        if repository is None:
            (self.workspace / "recipes").mkdir()
            (self.workspace / ENVIRONMENT["RECIPE"]).write_text(RECIPE)
        else:
            assert repository == "OWNER/qwen35"
            (self.workspace / path).symlink_to(ROOT)

    def setup_python(self, **versions: str) -> None:
        assert {*versions} == {"python-version"}
        assert re.fullmatch(r"3\.1[1-9]", versions["python-version"])

    def upload(self, name: str, path: str) -> None:
        self.kept[name] = sorted(file.name for file in (self.workspace / path).iterdir())


ACTIONS = {
    "actions/checkout": Runner.checkout,
    "actions/setup-python": Runner.setup_python,
    "actions/upload-artifact": Runner.upload,
}


@pytest.fixture(scope="module")
def runner(nano_path, tmp_path_factory) -> Runner:
    """The machine after every step of the workflow, each of which must succeed."""
    machine = Runner(tmp_path_factory.mktemp("runner"), nano_path)
    for step in JOB["steps"]:
        assert "${{" not in str(step), "no expression that only GitHub knows"
        code = machine.step(step)
        done = machine.log.get(step["name"])
        assert code == 0, f"{step['name']}: {done and done.stdout + done.stderr}"
    return machine


@pytest.mark.all
def test_every_step_of_the_workflow_succeeds_and_its_results_are_kept(runner):
    assert runner.kept["results"] == ["convert.xml", "verify.xml"]
    assert {"config.json", "model.safetensors", "qwen35-receipt.json"} <= {*runner.kept["model"]}
    for name in runner.kept["results"]:
        root = Xml.parse(runner.workspace / "results" / name).getroot()
        assert (root.get("failures"), root.get("errors")) == ("0", "0")
        assert int(root.get("tests")) > 5


@pytest.mark.all
def test_the_installed_command_is_the_one_that_ran(runner):
    where = runner.shell("python -c 'import qwen35_convert; print(qwen35_convert.__file__)'")
    assert where.stdout.startswith(str(runner.folder / "site"))
    assert runner.shell("command -v qwen35").stdout.startswith(str(runner.folder / "site"))


@pytest.mark.all
def test_the_receipt_holds_the_resolved_recipe(runner):
    receipt = json.loads((runner.workspace / "out/model/qwen35-receipt.json").read_text())
    recipe = runner.workspace / ENVIRONMENT["RECIPE"]
    assert receipt["recipe"] == read_recipe(recipe).model_dump(mode="json")
    assert receipt["recipe"]["quantize"]["scheme"] == "fp8-block"
    assert receipt["verdict"]["thresholds"]["max_kl"] == 0.05


@pytest.mark.all
def test_a_mistake_in_the_recipe_stops_the_run_with_an_annotation(runner):
    (step,) = (step for step in JOB["steps"] if step["name"] == "Check the recipe")
    recipe = runner.workspace / ENVIRONMENT["RECIPE"]
    recipe.write_text(RECIPE.replace("extends", "extend"))
    try:
        assert runner.step(step) == 2
    finally:
        recipe.write_text(RECIPE)
    said = runner.log[step["name"]].stdout
    assert said.startswith("::error file=recipes/ours.yaml,line=1,col=1,title=recipe::there is no")


@pytest.mark.all
def test_a_threshold_that_is_not_met_fails_the_run_with_an_annotation(runner):
    (step,) = (step for step in JOB["steps"] if step["name"] == "Verify")
    done = runner.shell(f"{step['run'].strip()} --level logits --max-kl 0.0001")
    assert done.returncode == 1
    assert re.search(r"^::error title=out/model%3A logits::", done.stdout, re.MULTILINE)
    (case,) = Xml.parse(runner.workspace / "results/verify.xml").findall(".//failure/..")
    assert case.get("name") == "logits"


def test_the_error_that_the_page_shows_is_the_one_that_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/ours.yaml").write_text(RECIPE.replace("extends", "extend"))
    done = called("convert", "x", "-o", "y", "--recipe", "recipes/ours.yaml", "--json")
    assert done.returncode == 2
    (shown,) = (text for kind, text in BLOCKS if kind == "json")
    assert done.stdout == shown


def test_the_recipe_for_editors_is_one(tmp_path):
    (tmp_path / "mine.yaml").write_text(EDITOR)
    recipe = read_recipe(tmp_path / "mine.yaml")
    assert [rule.match for rule in recipe.quantize.rules] == ["lm_head"]


def test_the_options_that_the_page_names_exist():
    said = called("convert", "-h").stdout + called("recipes", "-h").stdout
    options = {*re.findall(r"--[a-z][a-z0-9-]*", PAGE)} - {"--constraint", "--extra-index-url"}
    options -= {"--against", "--level", "--list-checks"}
    assert {option for option in options if option not in said} == set()
    verify = called("verify", "-h").stdout
    assert "--against" in verify
    assert "--list-checks" in verify
    assert "--level" in verify
