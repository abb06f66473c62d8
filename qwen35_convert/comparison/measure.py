"""Every candidate beside the source: converted if need be, verified, and removed again.

The source runs over the text once; what it computes is kept in a file for the others. Candidates
come one after another, so beside that file there is one artifact on the disk at a time. Files whose
hashes a conversion has just computed are not hashed again to verify it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from formats.checkpoint import Checkpoint
from qwen35_convert.artifact import Conversion
from qwen35_convert.comparison.candidates import Candidate
from qwen35_convert.comparison.result import Entry
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.conversion import convert_checkpoint
from qwen35_convert.levels import LOGITS
from qwen35_convert.options import Limit, RunOptions
from qwen35_convert.progress import ignore, notice
from qwen35_convert.run.memory import fit_verification
from qwen35_convert.verification.logits import LogitsCheck
from qwen35_convert.verification.proof import Checks
from qwen35_convert.verification.receipts import Receipt, read_receipt
from qwen35_convert.verification.shown import verify_shown
from qwen35_convert.verification.verify import Report
from qwen35_convert.write.receipt import Origin


@dataclass(slots=True)
class Measuring:
    """One source, and what its artifacts are measured by.

    path     what the source was opened from
    scratch  the folder of the artifacts of recipes, each removed before the next; None: they stay
    """

    source: Checkpoint
    origin: Origin
    path: Path
    check: LogitsCheck
    options: RunOptions
    scratch: Path | None

    def entries(self, candidates: Sequence[Candidate]) -> Iterator[Entry]:
        """Yield every candidate, measured. RecipeError, before the first, for too small a limit."""
        fit_verification(self.source, self.options.memory_limit, 1)
        say = notice if self.options.progress else ignore
        for i, one in enumerate(candidates, 1):
            say(f"{i} of {len(candidates)}: {one.name}")
            yield self._made(one) if one.recipe else self._measured(one)
            limit = _soft(self.options.memory_limit)
            self.options = replace(self.options, memory_limit=limit)

    def _made(self, one: Candidate) -> Entry:
        """Convert by a recipe and measure what comes of it."""
        assert one.recipe is not None, "it is to be made"
        options = replace(self.options, verify=self.scratch is None)
        try:
            done = convert_checkpoint(
                self.source, self.origin, self.path, one.path, one.recipe, options
            )
            self._remember(done)
            if done.failed and done.report:
                return Entry(one.name, done.report, one.recipe.name)
            return self._measured(one, self._hashes(done) if self.scratch else {})
        finally:
            if self.scratch is not None:
                shutil.rmtree(self.scratch, ignore_errors=True)

    def _remember(self, done: Conversion) -> None:
        """Take the hashes of the source's files, so that no other conversion computes them."""
        files = json.loads(done.receipt)["source"]["files"]
        self.origin = replace(
            self.origin, hashes={name: entry["sha256"] for name, entry in files.items()}
        )

    def _hashes(self, done: Conversion) -> dict[Path, str]:
        """Return the hashes of the files that a conversion has just read, and read back."""
        receipt = json.loads(done.receipt)
        read = {self.source.name_of(path): path for path in self.source.read_files()}
        places = [(read.get(name), entry) for name, entry in receipt["source"]["files"].items()]
        folder = open_checkpoint(done.out).folder
        places += [(folder / name, entry) for name, entry in receipt["output"]["files"].items()]
        return {path: entry["sha256"] for path, entry in places if path is not None}

    def _measured(self, one: Candidate, hashes: Mapping[Path, str] | None = None) -> Entry:
        artifact = open_checkpoint(one.path)
        report = self._verified(artifact, hashes or {})
        return Entry(
            one.name,
            report,
            one.recipe.name if one.recipe else None,
            calibrated=_calibration_text(artifact) == (report.logits or {}).get("text_sha256", ""),
        )

    def _verified(self, artifact: Checkpoint, hashes: Mapping[Path, str]) -> Report:
        """Verify at level logits; a calibration is judged by bounds, not run again."""
        options = self.options
        workers = fit_verification(
            self.source, _soft(options.memory_limit), options.threads(streamed=False)
        )
        checks = Checks(LOGITS, self.check, workers, by_bounds=True, hashes=hashes)
        return verify_shown(artifact, self.source, checks, bar=options.progress)


def _soft(limit: Limit | None) -> Limit | None:
    """Return a limit that refuses nothing that comes after a conversion or a pass over the text.

    What these load stays, and has held more than what is converted within a limit.
    """
    return None if limit is None else replace(limit, firm=False)


def _calibration_text(artifact: Checkpoint) -> str | None:
    """Return the SHA-256 of the text that an artifact was calibrated on, if its receipt says so."""
    receipt = read_receipt(artifact)
    if not isinstance(receipt, Receipt) or receipt.calibration is None:
        return None
    return str(receipt.calibration.get("text_sha256"))
