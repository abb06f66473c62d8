"""One artifact, from its job to its name: written aside, verified, sealed.

lock -> resume or start afresh -> items (an executor), hashes of the source -> side files
-> verify -> the source is still the same -> receipt -> durable -> final name

What fails its own verification gets the name OUT.failed, and OUT stays what it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from quant.errors import QuantError
from qwen35_convert.calibration.seen import receipt_of
from qwen35_convert.calibration.texts import Texts
from qwen35_convert.card.front_matter import README
from qwen35_convert.card.of_folder import card_of_folder
from qwen35_convert.containers.registry import container_for
from qwen35_convert.durable import writing
from qwen35_convert.errors import FetchError
from qwen35_convert.options import RunOptions, Share
from qwen35_convert.planning.plan import Plan
from qwen35_convert.progress import bytes_bar, ignore, notice
from qwen35_convert.recipe.recipe import Recipe
from qwen35_convert.run.executor import Executor
from qwen35_convert.run.placed import as_bytes
from qwen35_convert.run.worker import Effort
from qwen35_convert.verification.logits import LogitsCheck
from qwen35_convert.verification.proof import Checks
from qwen35_convert.verification.shown import verify_shown
from qwen35_convert.verification.verdict import verdict
from qwen35_convert.verification.verify import Report
from qwen35_convert.versions import version
from qwen35_convert.write.begin import begin
from qwen35_convert.write.digests import Digests
from qwen35_convert.write.journal import Journal
from qwen35_convert.write.receipt import Draft, Origin, Proof, dump_json
from qwen35_convert.write.sink import SEEN, FolderSink

KEYS = ("verify.max_kl", "verify.min_top1")  # of a recipe


@dataclass(frozen=True, slots=True)
class Conversion:
    """A finished conversion: its plan, its receipt, its verification (if any).

    out  where it is: OUT, or OUT.failed if verification failed
    """

    out: Path
    plan: Plan
    receipt: bytes
    report: Report | None

    @property
    def failed(self) -> bool:
        """Whether its own verification failed."""
        return self.report is not None and not self.report.passed

    def as_dict(self) -> dict[str, Any]:
        """Return the conversion as `convert --json` prints it."""
        return {
            "out": str(self.out),
            "tensors": len(self.plan.tensors),
            "bytes": self.plan.nbytes,
            "notes": list(self.plan.notes),
            "receipt": json.loads(self.receipt),
            "verify": self.report.as_dict() if self.report else None,
        }


@dataclass(frozen=True, slots=True)
class Job:
    """A conversion that passed every check of planning: source, plan, output and means.

    execute  converts the items, within this share of the machine
    texts    the text of the recipe, None if it reads none
    """

    plan: Plan
    source: Checkpoint
    origin: Origin
    out: Path
    options: RunOptions
    share: Share
    execute: Executor
    texts: Texts | None = None

    def effort(self, advance: Callable[[int], object]) -> Effort:
        """Return what the executor is told; `advance` is called with the bytes of each item."""
        say = notice if self.options.progress else ignore
        share, device = self.share, self.options.device
        return Effort(
            share.workers, device, lambda item: advance(item.nbytes), share.chunk_bytes, say
        )


def write_artifact(job: Job) -> Conversion:
    """Write aside, verify what was written, seal it with the receipt, give it its name."""
    sink = container_for(job.out).open_sink(job.out, job.plan)
    digest = digest_of(job.plan, job.source)
    sink.open()
    try:
        journal = begin(sink, digest, overwrite=job.options.overwrite)
        for name, content in job.plan.files.items():
            sink.add_file(name, content())
        source_files = _fill(job, sink, journal)
        for name, tensor in job.plan.computed.items():
            sink.write(name, 0, as_bytes(tensor))
        with Digests(job.share.verifiers) as digests:
            digests.begin(sink.artifact_files().values())
            report = _verified(job, sink) if job.options.verify else None
            _check_unchanged(job, digest)
            receipt = _seal(job, sink, digests, source_files, report)
        done = Conversion(job.out, job.plan, receipt, report)
        if done.failed:
            return replace(done, out=sink.reject())
        sink.commit()
    except (QuantError, FormatError):
        sink.discard()
        raise
    except FetchError as error:
        error.left = sink.left
        raise
    finally:
        sink.close()
    return done


def _verified(job: Job, sink: FolderSink) -> Report:
    checks = checks_of(job.plan.recipe, job.share.verifiers)
    calibration = _calibration(job, sink)
    checks = replace(checks, expected=job.plan, texts=job.texts, calibration=calibration)
    artifact = container_for(job.out).open(sink.artifact)
    return verify_shown(artifact, job.source, checks, bar=job.options.progress)


def _seal(
    job: Job,
    sink: FolderSink,
    digests: Digests,
    source_files: dict[str, Any],
    report: Report | None,
) -> bytes:
    """Add the card, hash what was written; add the receipt and return it."""
    proof = Proof(verdict(report), report.schemes) if report else Proof()
    draft = Draft(job.plan, job.origin, source_files, proof, _calibration(job, sink))
    if container_for(job.out).carded:
        card = card_of_folder(job.plan, job.source, draft.receipt({}), sink.receipt)
        sink.add_file(README, card)
    with writing(job.out, "reading it back", sink.left):
        output_files = digests.describe(sink.artifact_files())
    receipt = dump_json(draft.receipt(output_files))
    sink.add_file(sink.receipt, receipt)
    return receipt


def _calibration(job: Job, sink: FolderSink) -> dict[str, Any] | None:
    """Return what the receipt says of the text that calibrated, None if none did."""
    quantize = job.plan.recipe.quantize
    if job.texts is None:
        return None
    if quantize.chosen_by is None:
        return job.texts.as_dict()
    return receipt_of(sink.work / SEEN, quantize.method, job.options.device, job.texts)


def digest_of(plan: Plan, source: Checkpoint) -> str:
    """Return what ties a journal to source, recipe and version. FormatError if a file is gone."""
    try:
        return f"{plan.digest(source)} {version()}"
    except OSError as error:
        raise FormatError(f"{error.filename} cannot be read: {error.strerror}") from None


def _check_unchanged(job: Job, digest: str) -> None:
    """Refuse an artifact whose source has changed since. FormatError."""
    if digest_of(job.plan, job.source) != digest:
        raise FormatError(f"{job.source.folder} changed during the conversion")


def _fill(job: Job, sink: FolderSink, journal: Journal) -> dict[str, Any]:
    """Write all tensors; meanwhile hash the source, and return its files.

    A stream is hashed as it comes, unless it is read in part.
    """
    source, plan, known = job.source, job.plan, job.origin.known
    read = plan.read_files(source)
    near = {source.name_of(path): path for path in read if not source.is_far(path)}
    with Digests(job.share.workers) as digests, _bar(job, journal) as advance:
        try:
            digests.begin(path for name, path in near.items() if name not in known)
            if source.remote is not None and plan.recipe.only is None:
                source.remote.begin()
            job.execute(plan, source, sink, journal, job.effort(advance))
            return dict(sorted((_describe_far(job) | digests.describe(near, known)).items()))
        except OSError as error:
            raise FormatError(f"{error.filename} cannot be read: {error.strerror}") from None


def _bar(job: Job, journal: Journal) -> AbstractContextManager[Callable[[int], object]]:
    todo = (item for i, item in enumerate(job.plan.items) if i not in journal.done)
    total = sum(item.nbytes for item in todo)
    return bytes_bar(total, "convert", shown=job.options.progress)


def _describe_far(job: Job) -> dict[str, Any]:
    """Return the files that are on the hub, with the hashes that were held against the bytes."""
    source, plan = job.source, job.plan
    if source.remote is None:
        return {}
    far = [source.name_of(path) for path in plan.read_files(source) if source.is_far(path)]
    return source.remote.describe(far, source.files_of(row.atom for row in plan.items))


def checks_of(recipe: Recipe, workers: int) -> Checks:
    """Return the checks a recipe asks for."""
    gate = recipe.verify
    logits = LogitsCheck(gate.text, gate.max_kl, gate.min_top1, KEYS)
    return Checks(gate.level, logits, workers)
