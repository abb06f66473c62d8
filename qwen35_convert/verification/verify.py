"""Proof of an artifact: reopen what was written, census it, compare it with its source by value.

structure   headers and config alone
tensors     also every byte: scales, codes, hashes of the receipt; against the source if given
logits      also the predictions on real text against the source's

A level includes those above it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.json_file import read_object
from formats.safetensors.folder import MAX_NAME
from quant.measure import Error
from quant.stored import open_value, scheme_of
from qwen35_convert.containers.registry import container_of
from qwen35_convert.errors import RecipeError
from qwen35_convert.failure import Failure
from qwen35_convert.run.threads import each
from qwen35_convert.verification.compare import Compared, compare_atom, missing_atoms
from qwen35_convert.verification.diagnose import config_differences, explain, wrong_source
from qwen35_convert.verification.logits import (
    MEASURED_ONLY,
    LogitsCheck,
    check_logits,
    need_source,
)
from qwen35_convert.write.receipt import sha256_file

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = ("structure", "tensors", "logits")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Report:
    """What verification found. `passed` is false if anything at all is wrong."""

    level: str
    structure: dict[str, Any]
    tensors: list[dict[str, Any]]
    schemes: dict[str, dict[str, Any]]
    failures: list[Failure]
    against: str | None
    logits: dict[str, Any] | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failures

    def as_dict(self) -> dict[str, Any]:
        """Return the report as `verify --json` prints it."""
        return {
            "passed": self.passed,
            "level": self.level,
            "against": self.against,
            "structure": self.structure,
            "schemes": self.schemes,
            "tensors": self.tensors,
            "logits": self.logits,
            "failures": [{"tensor": f.tensor, "problem": f.problem} for f in self.failures],
        }


@dataclass(frozen=True, slots=True)
class Checks:
    """How far to look: the level, what the logits must meet, threads, whom to tell.

    partial  the artifact is a slice on purpose: what it lacks is no failure
    importance  by atom, of the columns, that the artifact was encoded with
    """

    level: str = "tensors"
    logits: LogitsCheck = MEASURED_ONLY
    workers: int = 1
    progress: Progress = lambda _: None
    partial: bool = False
    importance: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise RecipeError(f"level is {self.level!r}, expected one of {', '.join(LEVELS)}")


def verify(opened: Checkpoint, source: Checkpoint | None, checks: Checks) -> Report:
    """Verify an artifact, against its source if that is given.

    FormatError if the artifact cannot even be opened; what is wrong inside is in the report.
    """
    container = container_of(opened)
    failures = [] if checks.partial else list(container.census(opened))
    compared: list[Compared] = []
    logits, comparable = None, not opened.layout.problems
    if checks.level == "logits":
        source = need_source(source)
    if checks.level != "structure":
        failures += _receipt_failures(opened, checks.workers)
        failures += _defects(opened)
        failures += container.beside(opened, source)
        other = wrong_source(opened, source) if source else None
        if other:
            failures.append(other)
            comparable = False
        elif source:
            failures += config_differences(opened, source)
            failures += () if checks.partial else missing_atoms(opened, source)
            compared = _compare_all(opened, source, checks)
            failures += explain(opened, source, compared)
    if checks.level == "logits" and source and comparable:
        logits, shortfalls = check_logits(opened, source, checks.logits, checks.progress)
        failures += shortfalls
    return Report(
        level=checks.level,
        structure=_structure(opened),
        tensors=[_line(c) for c in compared],
        schemes=_by_scheme(compared),
        failures=failures,
        against=str(source.folder) if source else None,
        logits=logits,
    )


def _compare_all(artifact: Checkpoint, source: Checkpoint, checks: Checks) -> list[Compared]:
    import torch

    torch.set_num_threads(1)
    names = [name for name in artifact.layout.atoms if name in source.layout.atoms]

    def one(name: str) -> Compared:
        result = compare_atom(artifact, source, name, checks.importance.get(name))
        checks.progress(name)
        return result

    # in the order of the source
    order = sorted(names, key=lambda name: source.position(source.layout.atoms[name].stored))
    found = dict(zip(order, each(one, order, checks.workers), strict=True))
    return [found[name] for name in names]


def _structure(artifact: Checkpoint) -> dict[str, Any]:
    atoms = artifact.layout.atoms.values()
    return {
        "layout": artifact.layout.kind,
        "tensors": len(artifact.where),
        "bytes": sum(info.nbytes for info in artifact.infos().values()),
        "dtypes": dict(Counter(info.dtype for info in artifact.infos().values())),
        "schemes": dict(Counter(atom.scheme for atom in atoms)),
        "unproven": sorted({atom.scheme for atom in atoms if not scheme_of(atom).bounded}),
        "mtp_layers": artifact.layout.form.mtp_layers,
        "tied": artifact.layout.tied,
        "notes": artifact.layout.notes,
    }


def _receipt_failures(artifact: Checkpoint, workers: int) -> Iterator[Failure]:
    """Compare every file with the hash its receipt gives."""
    container = container_of(artifact)
    path = container.receipt_of(container.whole(artifact))
    if not path.is_file():
        return
    try:
        listed = _listed_files(path)
    except FormatError as error:
        yield Failure(path.name, f"is no receipt: {error}")
        return
    present = {
        name: artifact.folder / name for name in listed if (artifact.folder / name).is_file()
    }
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        hashes = dict(zip(present, pool.map(sha256_file, present.values()), strict=True))
    for name, said in listed.items():
        if name not in hashes:
            yield Failure(name, "is in the receipt, but is not there")
        elif hashes[name] != said:
            yield Failure(name, "is not the file that the receipt describes (SHA-256 differs)")


def _listed_files(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by its name. FormatError for what is no receipt."""
    output = read_object(path).get("output")
    files = output.get("files") if isinstance(output, dict) else None
    if not isinstance(files, dict):
        raise FormatError("it lists no files")
    for name, said in files.items():
        plain = Path(name).name == name and len(name) <= MAX_NAME
        if not plain or not isinstance(said, dict) or not isinstance(said.get("sha256"), str):
            raise FormatError(f"{name!r:.120} is no file of this folder")
    return {name: said["sha256"] for name, said in files.items()}


def _defects(artifact: Checkpoint) -> Iterator[Failure]:
    """Judge what is stored by itself: scales, codes, values that cannot be right."""
    for atom in artifact.layout.atoms.values():
        value = open_value(artifact, atom)
        keys = [part.key for part in value.scheme.parts("", (1, 1))]
        stored = dict(zip(keys, atom.parts, strict=True))
        counts: Counter[tuple[str, str]] = Counter()
        for start, stop in value.chunks(1) if value.scheme.inspected else ():
            for key, (defect, count) in value.scheme.defects(value.stored(start, stop)).items():
                counts[key, defect] += count
            value.release(start, stop)
        for (key, defect), count in counts.items():
            yield Failure(stored[key], f"has {count} {defect}")


def _line(compared: Compared) -> dict[str, Any]:
    line: dict[str, Any] = {
        "name": compared.name,
        "stored": compared.stored,
        "role": compared.role,
        "scheme": compared.scheme,
    }
    if compared.unproven:
        line["unproven"] = True
    if not compared.error.count:
        return line | {"identical": not compared.faults}
    return line | compared.error.as_dict()


def _by_scheme(compared: list[Compared]) -> dict[str, dict[str, Any]]:
    sums: dict[str, Error] = {}
    counts: Counter[str] = Counter()
    for atom in compared:
        counts[atom.scheme] += 1
        sums[atom.scheme] = sums.get(atom.scheme, Error()) + atom.error
    return {
        scheme: {"tensors": counts[scheme]} | (sums[scheme].as_dict() if sums[scheme].count else {})
        for scheme in sorted(sums)
    }
