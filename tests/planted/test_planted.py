"""Every planted fault is named at the lowest level where it is visible; no right artifact fails.

The tables beside this file hold the faults and the right artifacts; `python -m tests.planted`
prints what came of all of them. `make test` tries one of each kind and output but in `SLOW` bases,
`make test-all` all.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.planted.artifact import BASES, OUTPUTS, RECEIPT, Base, Workshop, find_base
from tests.planted.edit import editing
from tests.planted.fault import Case, changed, try_case, verify
from tests.planted.right import Right, artifacts
from tests.planted.table import cases, faults, sample
from tests.qwen35_convert.command import called

pytestmark = pytest.mark.filterwarnings("ignore")

CASES = list(cases())
SAMPLE = sample(CASES)
RIGHT = artifacts()
FIRST_OF_A_KIND = {right.kind: right.id for right in reversed(RIGHT)}
# bases that take five to ten seconds to make: by GPTQ
SLOW = {"wide-iq2_xxs-gptq", "wide-iq3_xxs-gptq", "wide-q2_k-gptq", "wide-q4_k_m-gptq"}


def group(base: str) -> pytest.MarkDecorator:
    """One worker tries all that is made from a base, so that it is made once."""
    return pytest.mark.xdist_group(f"planted-{base}")


def marked(case: Case) -> pytest.mark.ParameterSet:
    often = case.id in SAMPLE and case.base.id not in SLOW
    rare = [] if often else [pytest.mark.all]
    return pytest.param(case, id=case.id, marks=[group(case.base.id), *rare])


def marked_right(right: Right, *, ours: bool = True) -> pytest.mark.ParameterSet:
    often = FIRST_OF_A_KIND[right.kind] == right.id or (ours and right.kind == "ours")
    base = right.name.split(" ")[0]
    rare = [] if often and base not in SLOW else [pytest.mark.all]
    return pytest.param(right, id=right.id, marks=[group(base), *rare])


def marked_base(base: Base) -> pytest.mark.ParameterSet:
    rare = [pytest.mark.all] if base.id in SLOW else []
    return pytest.param(base, id=base.id, marks=[group(base.id), *rare])


@pytest.fixture(scope="session")
def workshop(tmp_path_factory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("planted"))


def pytest_generate_tests(metafunc):
    """Give the cases; ten thousand that a run of `make test` would drop again are not made."""
    if "case" in metafunc.fixturenames:
        rare = "not all" not in metafunc.config.option.markexpr
        chosen = CASES if rare else [case for case in CASES if case.id in SAMPLE]
        metafunc.parametrize("case", [marked(case) for case in chosen])


def test_a_planted_fault_is_named(case, workshop):
    result = try_case(workshop, case)
    said = f"exit code {result.outcome.code}: {result.outcome.text or 'nothing is said'}"
    assert result.verdict == "named", f"expected {' and '.join(result.wanted)}, got {said}"


@pytest.mark.parametrize("right", [marked_right(right) for right in RIGHT])
def test_a_right_artifact_passes(right, workshop):
    with workshop.room() as folder:
        outcome = verify(*right.make(workshop, folder))
    assert (outcome.code, outcome.text) == (0, "")


@pytest.mark.parametrize(
    "right", [marked_right(right, ours=False) for right in RIGHT if "slice" not in right.id]
)
def test_a_right_artifact_passes_alone(right, workshop):
    """Without its receipt and without a source; a slice of a model is none by itself."""
    with workshop.room() as folder:
        path, _ = right.make(workshop, folder)
        for receipt in (path / RECEIPT, path.with_name(f"{path.name}.receipt.json")):
            if receipt.is_file():
                receipt.unlink()
        outcome = verify(path, None)
    assert (outcome.code, outcome.text) == (0, "")


@pytest.mark.parametrize("base", [marked_base(base) for base in BASES])
def test_an_artifact_that_is_read_and_written_back_is_unchanged(base, workshop):
    """A fault changes what it is meant to change, and nothing else."""
    with workshop.room() as folder:
        artifact = workshop.place(base, folder)
        with editing(artifact):
            pass
        assert not changed(artifact)
        artifact.forge()
        assert not changed(artifact)


def test_there_are_hundreds_of_faults_and_no_name_twice():
    assert len(faults()) >= 200
    assert len(RIGHT) >= 80
    assert max(Counter(case.id for case in CASES).values()) == 1
    assert max(Counter(right.id for right in RIGHT).values()) == 1
    assert {case.base.output for case in CASES} == set(OUTPUTS)


def test_the_command_exits_with_1_and_names_the_tensor(workshop):
    with workshop.room() as folder:
        artifact = workshop.place(Base("nano", "bf16-split"), folder)
        with editing(artifact) as tensors:
            tensors.entry("model.norm.weight").data[0] ^= 1
        artifact.forge()
        done = called("verify", artifact.path, "--against", artifact.source)
    assert done.returncode == 1
    assert "model.norm.weight" in done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.all
def test_the_command_exits_with_3_where_the_artifact_cannot_be_opened(workshop):
    with workshop.room() as folder:
        artifact = workshop.place(find_base("wide-split"), folder)
        artifact.tensor_files()[1].unlink()
        done = called("verify", artifact.path, "--against", artifact.source)
    assert done.returncode == 3
    assert "model-00002-of-00004.gguf" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.all
def test_the_command_exits_with_0_for_a_right_artifact(workshop):
    with workshop.room() as folder:
        artifact = workshop.place(find_base("nano-bf16-split"), folder)
        done = called("verify", artifact.path, "--against", artifact.source)
    assert done.returncode == 0
