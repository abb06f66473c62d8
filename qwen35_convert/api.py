"""The Python API: what the commands do, with typed arguments and results.

Each function raises a ValueError kin for what a caller can cause: RecipeError (misused), FormatError
and QuantError and FetchError (input refused), OutputError (output refused), MissingError (this
machine lacks something).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint, open_checkpoint
from formats.tensor import FormatError
from quant.measure import Error
from quant.scheme import QuantError
from qwen35_convert.fetch import Fetched, fetch, parse_repo
from qwen35_convert.inspection import Inspection, inspect_checkpoint
from qwen35_convert.journal import Journal
from qwen35_convert.plan import Plan, make_plan
from qwen35_convert.progress import quiet, rows_bar
from qwen35_convert.receipt import RECEIPT, Origin, describe_files, dump_json, make_receipt
from qwen35_convert.recipe import Recipe, RecipeError, build_recipe, read_recipe
from qwen35_convert.run import run
from qwen35_convert.sink import JOURNAL, FolderSink, OutputError, check_out
from qwen35_convert.verify import Report
from qwen35_convert.verify import verify as verify_artifact

DEFAULT_RECIPE, DEQUANTISING_RECIPE = "fp8-block", "bf16-split"
MAX_DEFAULT_WORKERS = 8


class MissingError(ValueError):
    """This machine lacks what was asked for: a GPU, an optional extra."""


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


def _check_device(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise RecipeError(f"device is {device!r}, expected cpu or cuda")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise MissingError("device cuda: torch finds no GPU here, expected one")


def default_workers() -> int:
    """Return the number of worker threads for this machine."""
    return min(len(os.sched_getaffinity(0)), MAX_DEFAULT_WORKERS)


def open_source(source: str | Path, *, progress: bool = False) -> tuple[Checkpoint, Origin]:
    """Open a folder, a file, or `owner/name[@revision]` on the hub (fetched first)."""
    named = None if isinstance(source, Path) else parse_repo(source)
    if named is None:
        return open_checkpoint(Path(source)), Origin()
    fetched = fetch(*named, progress=progress)
    return open_checkpoint(fetched.path), Origin(fetched.repo, fetched.revision)


def inspect(source: str | Path) -> Inspection:
    """Return what a checkpoint is, from its headers."""
    return inspect_checkpoint(open_source(source)[0], str(source))


def plan(
    source: str | Path, recipe: Recipe | None = None, *, overrides: tuple[str, ...] = ()
) -> Plan:
    """Return the plan of a conversion; nothing is written."""
    opened, _ = open_source(source)
    return make_plan(opened, recipe or default_recipe(opened, overrides))


def download(
    repo: str, out: str | Path, *, revision: str | None = None, progress: bool = False
) -> Fetched:
    """Fetch the files a conversion needs into a folder, checked by size and hash."""
    named = parse_repo(repo)
    if named is None:
        raise RecipeError(f"{repo!r} is no repository, expected owner/name")
    return fetch(named[0], revision or named[1], to=Path(out), progress=progress)


def default_recipe(source: Checkpoint, overrides: tuple[str, ...] = ()) -> Recipe:
    """Return what is done when no recipe is named: fp8-block, and for FP8 input bf16-split.

    FP8 weights are never quantised a second time unless that is asked for.
    """
    name = DEQUANTISING_RECIPE if source.layout.quantized else DEFAULT_RECIPE
    return read_recipe(name, overrides)


def quantize_recipe(scheme: str, overrides: tuple[str, ...] = ()) -> Recipe:
    """Return the recipe of `quantize`: names and layout stay as they are."""
    return build_recipe(
        {
            "name": "quantize", "layout": "same", "experts": "same", "mtp": "keep",
            "vision": "keep", "quantize": {"scheme": scheme},
        },
        overrides,
    )  # fmt: skip


def convert(
    source: str | Path, out: str | Path, recipe: Recipe | None = None, *,
    overrides: tuple[str, ...] = (), workers: int | None = None, device: str = "cpu",
    overwrite: bool = False, verify: bool = True, progress: bool = False,
    on_plan: Callable[[Plan], None] = lambda _: None,
) -> Conversion:  # fmt: skip
    """Convert a checkpoint into the folder `out` and verify it against its source.

    An interrupted call is resumed by the same call. Nothing appears at `out` before it is complete.
    `overrides` (KEY=VALUE) apply to the default recipe; `on_plan` is called before anything is read.
    """
    _check_device(device)
    out = Path(out)
    opened, origin = open_source(source, progress=progress)
    check_out(out, opened.folder, overwrite=overwrite)
    job = make_plan(opened, recipe or default_recipe(opened, overrides))
    on_plan(job)
    count = workers or default_workers()
    how = _How(count, device, overwrite, progress)
    receipt = _write(job, opened, origin, out, how)
    report = None
    if verify:
        report = _verify(out, opened, job.recipe.verify.level, count, bar=progress)
    return Conversion(out, job, receipt, report)


def quantize(source: str | Path, out: str | Path, scheme: str, **options: Any) -> Conversion:
    """Quantise a checkpoint; its names and layout stay as they are. Options as in `convert`."""
    return convert(source, out, quantize_recipe(scheme), **options)


def verify(
    artifact: str | Path, against: str | Path | None = None, *, level: str = "tensors",
    workers: int | None = None, progress: bool = False,
) -> Report:  # fmt: skip
    """Verify an artifact, against its source if that is named."""
    source = open_source(against)[0] if against else None
    return _verify(Path(artifact), source, level, workers or default_workers(), bar=progress)


def _verify(
    out: Path, source: Checkpoint | None, level: str, workers: int, *, bar: bool
) -> Report:
    total = len(source.layout.atoms) if source else 0
    with rows_bar(total, "verify") if bar and total else quiet() as advance:
        return verify_artifact(
            out, source, level=level, workers=workers, progress=lambda _: advance()
        )


@dataclass(frozen=True, slots=True)
class _How:
    workers: int
    device: str
    overwrite: bool
    progress: bool


def _write(job: Plan, source: Checkpoint, origin: Origin, out: Path, how: _How) -> bytes:
    sink = FolderSink(out, job.shards)
    sink.open()
    try:
        errors, source_files = _fill(job, source, sink, how)
        receipt = _finish(job, source, origin, sink, errors, source_files, how.workers)
    except (QuantError, FormatError):
        sink.discard()
        raise
    finally:
        sink.close()
    return receipt


def _fill(
    job: Plan, source: Checkpoint, sink: FolderSink, how: _How
) -> tuple[dict[str, Error], dict[str, Any]]:
    """Write all tensors; meanwhile hash the source."""
    journal = Journal(sink.work / JOURNAL, job.digest(source))
    if not journal.resume() and (sink.work / JOURNAL).exists() and not how.overwrite:
        raise OutputError(
            f"{sink.out}: an unfinished conversion of another source or recipe is in {sink.work}\n"
            "  fix   finish it with its own recipe, or add --overwrite to discard it"
        )
    sink.create()
    journal.start()
    todo = len(job.rows) - len(journal.done)
    shown = rows_bar(todo, "convert") if how.progress else quiet()
    with ThreadPoolExecutor(max_workers=1) as hasher, shown as advance:
        hashes = hasher.submit(describe_files, source.read_files(), how.workers)
        errors = run(
            job, source, sink, journal,
            workers=how.workers, device=how.device, progress=lambda _: advance(),
        )  # fmt: skip
        return errors, hashes.result()


def _finish(
    job: Plan, source: Checkpoint, origin: Origin, sink: FolderSink,
    errors: dict[str, Error], source_files: dict[str, Any], workers: int,
) -> bytes:  # fmt: skip
    """Write everything that is not a tensor, then give the artifact its name."""
    for path in source.side_files:
        sink.add_file(path.name, path.read_bytes())
    sink.add_file("config.json", dump_json(job.config))
    sink.add_file("model.safetensors.index.json", dump_json(_index(job)))
    written = [p for p in sink.work.iterdir() if p.name not in ("lock", JOURNAL)]
    receipt = make_receipt(job, origin, errors, source_files, describe_files(written, workers))
    sink.add_file(RECEIPT, receipt)
    sink.commit()
    return receipt


def _index(job: Plan) -> dict[str, Any]:
    where = {info.name: shard.name for shard in job.shards for info in shard.infos}
    total = sum(info.nbytes for shard in job.shards for info in shard.infos)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}


__all__ = [
    "Conversion", "FormatError", "MissingError", "OutputError", "QuantError", "RecipeError",
    "convert", "inspect", "plan", "quantize", "verify",
]  # fmt: skip
