"""One conversion from its plan to the finished artifact: written aside, verified, sealed, named.

lock -> resume or start afresh -> rows (an engine), hashes of the source -> side files
-> verify -> the source is still the same -> receipt -> durable -> final name
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from quant.errors import QuantError
from qwen35_convert.containers.safetensors.side_files import add_side_files
from qwen35_convert.durable import writing
from qwen35_convert.errors import FetchError, OutputError
from qwen35_convert.planning.plan import Plan
from qwen35_convert.progress import quiet, rows_bar
from qwen35_convert.recipe import Recipe
from qwen35_convert.run.executor import Means
from qwen35_convert.run.memory import Limit
from qwen35_convert.verification.logits import LogitsCheck
from qwen35_convert.verification.verify import Checks, Report, verify
from qwen35_convert.write.file_sink import FileSink, is_gguf
from qwen35_convert.write.journal import Journal
from qwen35_convert.write.receipt import Origin, describe_files, make_receipt, version
from qwen35_convert.write.sink import JOURNAL, FolderSink


@dataclass(frozen=True, slots=True)
class Conversion:
    """A finished conversion: where it is, its plan, its receipt, its verification (if any)."""

    out: Path
    plan: Plan
    receipt: bytes
    report: Report | None

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


class Limits(TypedDict, total=False):
    """What to work with.

    workers       threads (default: cores, at most 8; for a stream one); fewer if memory is short
    memory_limit  what the process may take (default: 3/4 of what is free)
    """

    workers: int | None
    memory_limit: Limit | None


class Options(Limits, total=False):
    """How a conversion runs; only `overrides`, and `verify` in the receipt, change its result.

    overrides  KEY=VALUE changes to the default recipe
    device     cpu or cuda: where to quantise
    overwrite  replace a model at `out`
    verify     compare with the source after writing (default)
    progress   show bars on stderr
    engine     threads of this process, or ray: the nodes of a cluster on a shared file system
    on_plan    called with the plan before anything is read
    stream     read a source on the hub by ranges, without a copy on the disk
    """

    overrides: tuple[str, ...]
    device: str
    overwrite: bool
    verify: bool
    progress: bool
    engine: str
    on_plan: Callable[[Plan], object]
    stream: bool


def write_artifact(
    job: Plan, source: Checkpoint, origin: Origin, out: Path, means: Means, options: Options
) -> Conversion:
    """Write aside, verify what was written, seal it with the receipt, give it its name."""
    sink = (FileSink if is_gguf(out) else FolderSink)(out, job.shards)
    digest = digest_of(job, source)
    sink.open()
    try:
        _check_still_free(sink, overwrite=options.get("overwrite", False))
        journal = _begin(sink, digest, overwrite=options.get("overwrite", False))
        source_files = _fill(job, source, origin, sink, journal, means)
        if job.config:
            add_side_files(job, source, sink)
        report = None
        if options.get("verify", True):
            checks = replace(checks_of(job.recipe, means.share.verifiers), weights=job.weights)
            report = verify_shown(sink.artifact, source, checks, bar=options.get("progress", False))
        _check_unchanged(job, source, digest)
        with writing(out, "reading it again", sink.left):
            output_files = describe_files(sink.artifact_files(), means.share.workers)
        measured = report.schemes if report else None
        receipt = make_receipt(job, origin, source_files, output_files, measured)
        sink.add_file(sink.receipt, receipt)
        sink.commit()
    except (QuantError, FormatError):
        sink.discard()
        raise
    except FetchError as error:
        error.left = sink.left
        raise
    finally:
        sink.close()
    return Conversion(out, job, receipt, report)


def checks_of(recipe: Recipe, workers: int) -> Checks:
    """Return the checks a recipe asks for."""
    asked = recipe.verify
    limits = LogitsCheck(asked.text, asked.max_kl, asked.min_top1)
    return Checks(asked.level, limits, workers, partial=recipe.only is not None)


def verify_shown(out: Path, source: Checkpoint | None, checks: Checks, *, bar: bool) -> Report:
    """Verify an artifact, with a bar on stderr if that is asked for."""
    total = len(source.layout.atoms) if source else 0
    with rows_bar(total, "verify") if bar and total else quiet() as advance:
        return verify(out, source, replace(checks, progress=lambda _: advance()))


def digest_of(job: Plan, source: Checkpoint) -> str:
    """Return what ties a journal to source, recipe and version. FormatError if a file is gone."""
    try:
        return f"{job.digest(source)} {version()}"
    except OSError as error:
        raise FormatError(f"{error.filename} cannot be read: {error.strerror}") from None


def _check_unchanged(job: Plan, source: Checkpoint, digest: str) -> None:
    """Refuse what was made of a source that is now another."""
    if digest_of(job, source) != digest:
        raise FormatError(f"{source.folder} changed while it was converted")


def _check_still_free(sink: FolderSink, *, overwrite: bool) -> None:
    """Refuse an OUT that another conversion finished after this one had looked."""
    entry = sink.entry
    if not overwrite and (entry.is_file() or (entry.is_dir() and any(entry.iterdir()))):
        sink.discard()
        raise OutputError(f"{entry} was written by another conversion meanwhile")


def _begin(sink: FolderSink, digest: str, *, overwrite: bool) -> Journal:
    """Return the journal of this conversion, resumed if it is its own; every file is reserved."""
    journal = Journal(sink.work / JOURNAL, digest, sink.left)
    if journal.resume():
        if not sink.is_whole():
            journal.forget()
    else:
        _check_abandoned(sink, overwrite=overwrite)
        sink.clear()
    sink.create()
    journal.start()
    return journal


def _fill(
    job: Plan, source: Checkpoint, origin: Origin, sink: FolderSink, journal: Journal, means: Means
) -> dict[str, Any]:
    """Write all tensors; meanwhile hash the source, and return its files.

    A stream is hashed as it comes, unless it is read in part.
    """
    todo = len(job.rows) - len(journal.done)
    shown = rows_bar(todo, "convert") if means.progress else quiet()
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=1) as hasher, shown as advance:
        near = [path for path in job.read_files(source) if not source.is_far(path)]
        hashes = hasher.submit(describe_files, near, means.share.workers, origin.hashes, stop)
        try:
            if source.remote is not None and job.recipe.only is None:
                source.remote.begin()
            means.engine(job, source, sink, journal, means.effort(advance))
            return _describe_far(job, source) | hashes.result()
        except OSError as error:
            raise FormatError(f"{error.filename} cannot be read: {error.strerror}") from None
        finally:
            stop.set()


def _describe_far(job: Plan, source: Checkpoint) -> dict[str, Any]:
    """Return the files that are on the hub, with the hashes that were held against the bytes."""
    if source.remote is None:
        return {}
    far = [path for path in job.read_files(source) if source.is_far(path)]
    return source.remote.describe(far, source.files_of(row.atom for row in job.rows))


def _check_abandoned(sink: FolderSink, *, overwrite: bool) -> None:
    if (sink.work / JOURNAL).exists() and not overwrite:
        raise OutputError(
            f"{sink.out}: an unfinished conversion of another source or recipe is in {sink.work}\n"
            "  fix   finish it with its own recipe, or add --overwrite to discard it"
        )
