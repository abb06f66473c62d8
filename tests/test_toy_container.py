"""A container is one file and one row: this one is added here, and every command works on it.

A folder NAME.toy with all tensors in one file behind a magic word, and a table of them in JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import qwen35_convert as q
from formats.checkpoint import Checkpoint
from formats.family.config import read_config
from formats.family.recognise import recognise
from formats.safetensors.file import torch_dtype
from formats.tensor import TensorInfo
from quant.registry import RECOGNISERS
from qwen35_convert import api
from qwen35_convert.containers import registry
from qwen35_convert.containers.safetensors.container import SafetensorsFolder
from qwen35_convert.failure import Failure
from qwen35_convert.planning.plan import Plan, Shard
from qwen35_convert.recipe.parts import FORMATS, Format
from qwen35_convert.recipe.recipe import Recipe
from qwen35_convert.text.generation import Prompt
from qwen35_convert.write.receipt import dump_json

MAGIC, WEIGHTS, TABLE = b"TOYBOX 1", "weights.toy", "table.json"


class ToyFile:
    """The one file of tensors."""

    def __init__(self, path: Path, table: dict[str, list]) -> None:
        self.path, self.infos, self.ranges = path, {}, {}
        for name, (dtype, shape, start) in table.items():
            info = TensorInfo(name, dtype, tuple(shape))
            self.infos[name], self.ranges[name] = info, (start, start + info.nbytes)

    def read(self, name: str) -> torch.Tensor:
        info, (start, _) = self.infos[name], self.ranges[name]
        data = np.fromfile(self.path, np.uint8, info.nbytes, offset=start)
        return torch.from_numpy(data).view(torch_dtype(info.dtype)).view(info.shape)

    def raw(self, name: str) -> bytes:
        start, stop = self.ranges[name]
        return self.path.read_bytes()[start:stop]

    def release(self) -> None:
        """Nothing is mapped."""


@dataclass(frozen=True, slots=True)
class ToyBox(SafetensorsFolder):
    """What is written of a folder of safetensors, in another kind of file."""

    name: str = "toy"
    out: str = "a folder whose name ends in .toy"
    ending: str = ".toy"
    loaders: tuple[str, ...] = ()

    def takes(self, path: Path) -> bool:
        return path.suffix == ".toy"

    def open(self, path: Path, name: str = "") -> Checkpoint:
        config = read_config(json.loads((path / "config.json").read_bytes()))
        file = ToyFile(path / WEIGHTS, json.loads((path / TABLE).read_bytes()))
        tokenizer = (path / "tokenizer.json").read_bytes()
        return Checkpoint(
            container=self.name,
            folder=path,
            place=path,
            name=name or path.stem,
            config=config,
            layout=recognise(file.infos, config, RECOGNISERS),
            files={WEIGHTS: file},
            where=dict.fromkeys(file.infos, WEIGHTS),
            sides={"tokenizer.json": tokenizer},
            beside=("config.json", TABLE),
        )

    def expected(self, source: Checkpoint, recipe: Recipe, stem: str, *, widened: bool) -> Plan:
        plan = SafetensorsFolder.expected(self, source, recipe, stem, widened=widened)
        infos = tuple(plan.tensors.values())
        starts = np.cumsum([len(MAGIC), *(info.nbytes for info in infos)]).tolist()
        table = {i.name: [i.dtype, i.shape, at] for i, at in zip(infos, starts, strict=False)}
        shard = Shard(WEIGHTS, infos, MAGIC, tuple(starts[:-1]), starts[-1])
        files = {n: f for n, f in plan.files.items() if not n.startswith("model.")}
        files[TABLE] = partial(dump_json, table)
        return replace(plan, container=self.name, shards=(shard,), files=files)

    def header_differences(self, path: Path, expected: bytes) -> Iterator[str]:
        with path.open("rb") as file:
            if file.read(len(expected)) != expected:
                yield "does not begin with its magic word"

    def census(self, artifact: Checkpoint) -> Iterator[Failure]:
        for problem in artifact.layout.problems:
            yield Failure(problem.tensor, problem.problem)


@pytest.fixture(scope="module", autouse=True)
def _registered():
    """Add the container for these tests alone."""
    containers, forms = dict(registry.CONTAINERS), dict(FORMATS)
    registry.register(ToyBox(), Format())
    yield
    registry.CONTAINERS.clear()
    registry.CONTAINERS.update(containers)
    FORMATS.clear()
    FORMATS.update(forms)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory, nano_path):
    out = tmp_path_factory.mktemp("toy") / "m.toy"
    recipe_of_toy = q.read_recipe("fp8-block", ["export.format=toy"])
    assert q.convert(nano_path, out, recipe_of_toy).report.passed
    return out


def test_the_files_are_those_of_the_container(artifact):
    names = {path.name for path in artifact.iterdir()}
    assert {WEIGHTS, TABLE, "config.json", "tokenizer.json", "qwen35-receipt.json"} <= names
    assert not any(name.endswith(".safetensors") for name in names)


@pytest.mark.parametrize("level", ["structure", "tensors", "logits"])
def test_verification_passes_at_every_level(artifact, nano_path, level, short_text):
    checks = q.LogitsCheck(short_text) if level == "logits" else q.LogitsCheck()
    report = q.verify(artifact, nano_path, level=level, logits=checks)
    assert report.passed, report.failures


def test_verification_asks_the_container_for_its_own_checks(artifact, nano_path, tmp_path):
    broken = tmp_path / "broken.toy"
    broken.mkdir()
    for file in artifact.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    data = (broken / WEIGHTS).read_bytes()
    (broken / WEIGHTS).write_bytes(b"?" + data[1:])
    failures = q.verify(broken, nano_path, level="structure").failures
    assert [failure.tensor for failure in failures] == [WEIGHTS]


def test_it_is_inspected_and_run(artifact):
    assert q.inspect(artifact).quantization == "fp8-block"
    assert "".join(api.run_text(artifact, Prompt("In the beginning", max_tokens=4)))


def test_it_is_a_source_like_any_other(artifact, nano_path, tmp_path):
    assert q.convert(artifact, tmp_path / "m.gguf", "gguf-q8_0").report.passed
    back = q.convert(artifact, tmp_path / "back")
    direct = q.convert(nano_path, tmp_path / "fp8", "fp8-block")
    again = q.convert(direct.out, tmp_path / "again")
    weights = [(done.out / "model.safetensors").read_bytes() for done in (back, again)]
    assert weights[0] == weights[1]


def test_out_must_have_the_name_that_the_container_takes(nano_path, tmp_path):
    with pytest.raises(q.api.RecipeError, match=r"expected a folder whose name ends in \.toy"):
        q.convert(nano_path, tmp_path / "out", q.read_recipe("fp8-block", ["export.format=toy"]))
