"""What a comparison found: one line for each artifact, by size, and which of them are worth it.

An artifact is on the frontier if none that is as small or smaller has a lower mean KL; one that
failed its verification is not, and stands in nobody's way.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from qwen35_convert.text.tokens import DEFAULT
from qwen35_convert.verification.verify import Report
from qwen35_convert.versions import versions

WORST = 10
MEASURED = ("kl_mean", "kl_stderr", "kl_median", "kl_p999", "top1", "ppl_source", "ppl_artifact")
COLUMNS = (
    "name", "recipe", "passed", "frontier", "bytes", "model_bytes", "bits_per_weight", *MEASURED,
    "ppl_ratio", "tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One artifact, verified against the source.

    recipe      by which it was made for the comparison; None: it was there
    calibrated  it was calibrated on the very text on which it is measured
    frontier    nothing as small is nearer to the source
    """

    name: str
    report: Report
    recipe: str | None = None
    calibrated: bool = False
    frontier: bool = False

    @property
    def kl(self) -> float:
        """The mean KL; infinite if it was not measured or is no number."""
        kl = self.report.logits["kl_mean"] if self.report.logits else inf
        return float(kl) if isfinite(kl) else inf

    @property
    def layers(self) -> Sequence[Mapping[str, Any]]:
        """The error of the residual stream after each layer."""
        return self.report.logits["layers"] if self.report.logits else ()

    @property
    def num_shared(self) -> int:
        """How many layers hold the source's numbers, got its stream and were not run again."""
        return sum(layer["shared"] for layer in self.layers)

    def worst(self, count: int = WORST) -> list[dict[str, Any]]:
        """Return the quantised tensors with the largest relative error, that first."""
        lines = [line for line in self.report.tensors if "relative_rms" in line]
        return sorted(lines, key=lambda line: -line["relative_rms"])[:count]

    def figures(self) -> dict[str, Any]:
        """Return what tables show, in the order of COLUMNS; None: not measured."""
        logits = self.report.logits or {}
        size = self.report.size.as_dict()
        source, own = logits.get("ppl_source"), logits.get("ppl_artifact")
        values = {
            "name": self.name,
            "recipe": self.recipe,
            "passed": self.report.passed,
            "frontier": self.frontier,
            **size,
            **{key: logits.get(key) for key in (*MEASURED, "tokens")},
            "ppl_ratio": own / source if own is not None and source else None,
        }
        return {key: values[key] for key in COLUMNS}

    def as_dict(self) -> dict[str, Any]:
        """Return everything, as `compare --json` prints it."""
        return self.figures() | {
            "calibrated_on_text": self.calibrated,
            "calibration": self.report.calibration,
            "schemes": self.report.schemes,
            "layers": list(self.layers),
            "by_role": [one.as_dict() for one in self.report.by_role],
            "worst": self.worst(),
            "failures": [failure.as_dict() for failure in self.report.failures],
            "notes": self.report.notes,
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """Artifacts of one source, the smallest first.

    text  the name of the text on which they are measured
    """

    source: str
    text: str
    entries: tuple[Entry, ...]
    versions: Mapping[str, str] = field(default_factory=versions)

    @staticmethod
    def of(source: str, text: str, entries: Sequence[Entry]) -> Comparison:
        """Return artifacts by size, those on the frontier marked."""
        ordered = sorted(entries, key=lambda one: (one.report.size.model, one.kl))
        label = "the bundled text" if text == DEFAULT else Path(text).name
        return Comparison(source, label, tuple(_marked(ordered)))

    @property
    def passed(self) -> bool:
        """Whether every artifact was verified."""
        return all(one.report.passed for one in self.entries)

    @property
    def measured(self) -> dict[str, Any] | None:
        """What was measured of the first artifact whose predictions were; None: of none."""
        return next((one.report.logits for one in self.entries if one.report.logits), None)

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as `compare --json` prints it."""
        size = next(
            (one.report.source_size for one in self.entries if one.report.source_size), None
        )
        text = self.measured or {}
        return {
            "passed": self.passed,
            "source": {"name": self.source, **(size.as_dict() if size else {})},
            "text": {"name": self.text, "sha256": text.get("text_sha256")} if text else None,
            "artifacts": [one.as_dict() for one in self.entries],
            "versions": dict(self.versions),
        }

    def csv(self) -> str:
        """Return the figures as a table, a line each."""
        table = io.StringIO()
        writer = csv.DictWriter(table, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(one.figures() for one in self.entries)
        return table.getvalue()


def _marked(ordered: Sequence[Entry]) -> Iterator[Entry]:
    """Yield artifacts by size, with those marked that are nearer than all before."""
    best = inf
    for one in ordered:
        frontier = one.report.passed and one.kl < best
        best = one.kl if frontier else best
        yield replace(one, frontier=frontier)
