"""The Python API: what the commands do, with typed arguments and results.

Each function raises a ValueError kin for what a caller can cause: RecipeError (misused),
FormatError, QuantError and FetchError (input refused), OutputError (output refused), MissingError
(the machine lacks something).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack

from formats.checkpoint import Checkpoint
from formats.tensor import FormatError
from quant.scheme import QuantError
from qwen35_convert.bench import Bench, Sweep, run_bench
from qwen35_convert.fetch import Fetched, FetchError, fetch, parse_repo
from qwen35_convert.file_sink import FileSink, check_out_files, finish_moves
from qwen35_convert.generation import Prompt, generate_text
from qwen35_convert.imatrix_file import ImatrixReport, make_imatrix
from qwen35_convert.inspection import Inspection, inspect_checkpoint
from qwen35_convert.journal import Journal
from qwen35_convert.logits import MEASURED_ONLY, LogitsCheck, token_rows
from qwen35_convert.memory import Limit, Share, fit_memory, fit_verification
from qwen35_convert.missing import MissingError
from qwen35_convert.plan import Plan
from qwen35_convert.planning import make_plan
from qwen35_convert.progress import quiet, rows_bar
from qwen35_convert.receipt import Origin, describe_files, make_receipt, receipt_name, version
from qwen35_convert.recipe import Recipe, RecipeError, build_recipe, read_recipe
from qwen35_convert.run import Effort, run
from qwen35_convert.side_files import add_side_files
from qwen35_convert.sink import JOURNAL, FolderSink, OutputError, check_out, writing
from qwen35_convert.source import open_headers, open_source
from qwen35_convert.text import DEFAULT
from qwen35_convert.verify import Checks, Report
from qwen35_convert.verify import verify as verify_artifact

DEFAULT_RECIPE, DEQUANTISING_RECIPE, GGUF_RECIPE = "fp8-block", "bf16-split", "gguf-q8_0"
MAX_DEFAULT_WORKERS = 8


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


def inspect(source: str | Path) -> Inspection:
    """Return what a checkpoint is, from its headers; of one on the hub nothing else is fetched."""
    return inspect_checkpoint(open_headers(source), str(source))


def plan(
    source: str | Path, recipe: Recipe | None = None, *, overrides: tuple[str, ...] = (),
    out: str | Path = "model", stream: bool = False,
) -> Plan:  # fmt: skip
    """Return the plan of a conversion to `out`; nothing is written.

    Of a source on the hub come headers and the few values that planning looks at, by ranges; or the
    cache's copy is used, unless `stream` is asked for.
    """
    opened = open_headers(source, stream=stream)
    return _plan(opened, recipe or default_recipe(opened, overrides, out=out), Path(out))


def _plan(source: Checkpoint, recipe: Recipe, out: Path) -> Plan:
    """Plan, after holding OUT against the format the recipe asks for."""
    if (recipe.export.format == "gguf") != is_gguf(out):
        wanted = "a name that ends in .gguf" if recipe.export.format == "gguf" else "a folder"
        raise RecipeError(
            f"recipe {recipe.name} writes {recipe.export.format}, but OUT is {out.name}, "
            f"expected {wanted}"
        )
    return make_plan(source, recipe, out.stem)


def is_gguf(out: Path) -> bool:
    """Whether OUT is to be a GGUF file: its name ends so."""
    return out.suffix == ".gguf"


def download(
    repo: str, out: str | Path, *, revision: str | None = None, progress: bool = False
) -> Fetched:
    """Fetch the files a conversion needs into a folder, checked by size and hash."""
    named = parse_repo(repo)
    if named is None:
        raise RecipeError(f"{repo!r} is no repository, expected owner/name")
    return fetch(named[0], revision or named[1], to=Path(out), progress=progress)


def default_recipe(
    source: Checkpoint, overrides: tuple[str, ...] = (), *, out: str | Path = ""
) -> Recipe:
    """Return what is done when no recipe is named: fp8-block, and for quantised input bf16-split.

    A GGUF file gets gguf-q8_0. Weights are never quantised a second time to a folder unless that
    is asked for.
    """
    name = DEQUANTISING_RECIPE if source.layout.quantized else DEFAULT_RECIPE
    return read_recipe(GGUF_RECIPE if is_gguf(Path(out)) else name, overrides)


def quantize_recipe(scheme: str, overrides: tuple[str, ...] = ()) -> Recipe:
    """Return the recipe of `quantize`: names and layout stay as they are."""
    return build_recipe(
        {
            "name": "quantize", "layout": "same", "experts": "same", "mtp": "keep",
            "vision": "keep", "quantize": {"scheme": scheme},
        },
        overrides,
    )  # fmt: skip


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
    on_plan    called with the plan before anything is read
    stream     read a source on the hub by ranges, without a copy on the disk
    """

    overrides: tuple[str, ...]
    device: str
    overwrite: bool
    verify: bool
    progress: bool
    on_plan: Callable[[Plan], object]
    stream: bool


def convert(
    source: str | Path, out: str | Path, recipe: Recipe | None = None, **options: Unpack[Options]
) -> Conversion:
    """Convert a checkpoint into the folder or the GGUF file `out`; verify it against its source.

    An interrupted call is resumed by the same call. Nothing appears at `out` before it is complete.
    """
    out = Path(out)
    _check_device(options.get("device", "cpu"))
    progress, stream = options.get("progress", False), options.get("stream", False)
    opened, origin = open_source(source, progress=progress, stream=stream)
    overwrite = options.get("overwrite", False)
    if not is_gguf(out):
        origin_path = opened.read_files()[0] if opened.gguf else opened.folder
        check_out(out, origin_path, overwrite=overwrite)
    chosen = recipe or default_recipe(opened, options.get("overrides", ()), out=out)
    job = _plan(opened, chosen, out)
    if is_gguf(out):
        names = [shard.name for shard in job.shards]
        if finish_moves(out, out.with_name(names[0]), _digest(job, opened)):
            receipt = out.with_name(receipt_name(out)).read_bytes()
            return Conversion(out, job, receipt, None)
        check_out_files(out, names, opened.read_files(), overwrite=overwrite)
    if options.get("verify", True):
        _check_verifiable(job)
    if options.get("verify", True) and job.recipe.verify.level == "logits":
        token_rows(opened, job.recipe.verify.text)  # refused now, not after the work
    options.get("on_plan", _keep_quiet)(job)
    share = fit_memory(
        job, opened, options.get("memory_limit"), _workers(opened, options),
        verify=options.get("verify", True),
    )  # fmt: skip
    return _write(job, opened, origin, out, share, options)


def _check_verifiable(job: Plan) -> None:
    """Refuse to verify a slice of a GGUF file that cannot be opened: its vocabulary is missing."""
    if job.recipe.only and not job.config and "token_embd.weight" not in job.tensors:
        raise RecipeError(
            f"only is {job.recipe.only!r}: a GGUF file without token_embd.weight cannot be "
            "opened again to verify it\n  fix   add --no-verify"
        )


def _keep_quiet(_: Plan) -> None:
    """Keep quiet about a plan."""


def quantize(
    source: str | Path, out: str | Path, scheme: str, **options: Unpack[Options]
) -> Conversion:
    """Quantise a checkpoint; its names and layout stay as they are."""
    return convert(source, out, quantize_recipe(scheme), **options)


def verify(
    artifact: str | Path, against: str | Path | None = None, *, level: str = "tensors",
    logits: LogitsCheck = MEASURED_ONLY, progress: bool = False, **limits: Unpack[Limits],
) -> Report:  # fmt: skip
    """Verify an artifact, against its source if that is named."""
    source = open_source(against)[0] if against else None
    workers = limits.get("workers") or default_workers()
    fit = fit_verification(source, limits.get("memory_limit"), workers)
    checks = Checks(level, logits, fit)
    return _verify(Path(artifact), source, checks, bar=progress)


def imatrix(
    source: str | Path, out: str | Path, *, text: str = DEFAULT, chunks: int | None = None,
    overwrite: bool = False, progress: bool = False,
) -> ImatrixReport:  # fmt: skip
    """Collect an importance matrix over a text and write llama.cpp's imatrix file."""
    opened, _ = open_source(source)
    layers = len(opened.config.layer_types) + opened.layout.form.mtp_layers
    with rows_bar(layers, "imatrix") if progress else quiet() as advance:
        return make_imatrix(opened, text, Path(out), chunks=chunks, overwrite=overwrite,
                            progress=lambda _: advance())  # fmt: skip


def bench(artifact: str | Path, sweep: Sweep | None = None, *, progress: bool = False) -> Bench:
    """Time an artifact on this machine, beside what its card needs at least."""
    opened, _ = open_source(artifact)
    asked = sweep or Sweep()
    steps = len(asked.prefill) + len(asked.batch)
    with rows_bar(steps, "bench") if progress else quiet() as advance:
        return run_bench(opened, asked, lambda _: advance())


def run_text(artifact: str | Path, prompt: Prompt) -> Iterator[str]:
    """Yield the text an artifact generates, piece by piece."""
    opened, _ = open_source(artifact)
    return generate_text(opened, prompt)


def checks_of(recipe: Recipe, workers: int) -> Checks:
    """Return the checks a recipe asks for."""
    asked = recipe.verify
    limits = LogitsCheck(asked.text, asked.max_kl, asked.min_top1)
    return Checks(asked.level, limits, workers, partial=recipe.only is not None)


def _verify(out: Path, source: Checkpoint | None, checks: Checks, *, bar: bool) -> Report:
    total = len(source.layout.atoms) if source else 0
    with rows_bar(total, "verify") if bar and total else quiet() as advance:
        return verify_artifact(out, source, replace(checks, progress=lambda _: advance()))


def _write(
    job: Plan, source: Checkpoint, origin: Origin, out: Path, share: Share, options: Options
) -> Conversion:
    """Write aside, verify what was written, seal it with the receipt, give it its name."""
    sink = (FileSink if is_gguf(out) else FolderSink)(out, job.shards)
    digest = _digest(job, source)
    sink.open()
    try:
        _check_still_free(sink, overwrite=options.get("overwrite", False))
        source_files = _fill(job, source, origin, sink, share, options)
        if job.config:
            add_side_files(job, source, sink)
        report = None
        if options.get("verify", True):
            checks = replace(checks_of(job.recipe, share.verifiers), weights=job.weights)
            report = _verify(sink.artifact, source, checks, bar=options.get("progress", False))
        _check_unchanged(job, source, digest)
        with writing(out, "reading it again", sink.left):
            output_files = describe_files(sink.artifact_files(), share.workers)
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


def _workers(source: Checkpoint, options: Options) -> int:
    """Return the number of threads. A stream has one reader unless more are asked for.

    More of them stand at places further apart than the memory reaches, and read blocks twice; the
    network is slower than one thread.
    """
    return options.get("workers") or (default_workers() if source.remote is None else 1)


def _digest(job: Plan, source: Checkpoint) -> str:
    """Return what ties a journal to source, recipe and version. FormatError if a file is gone."""
    try:
        return f"{job.digest(source)} {version()}"
    except OSError as error:
        raise FormatError(f"{error.filename} cannot be read: {error.strerror}") from None


def _check_unchanged(job: Plan, source: Checkpoint, digest: str) -> None:
    """Refuse what was made of a source that is now another."""
    if _digest(job, source) != digest:
        raise FormatError(f"{source.folder} changed while it was converted")


def _check_still_free(sink: FolderSink, *, overwrite: bool) -> None:
    """Refuse an OUT that another conversion finished after this one had looked."""
    out = sink.out
    if not overwrite and (out.is_file() or (out.is_dir() and any(out.iterdir()))):
        sink.discard()
        raise OutputError(f"{out} was written by another conversion meanwhile")


def _fill(
    job: Plan, source: Checkpoint, origin: Origin, sink: FolderSink, share: Share,
    options: Options,
) -> dict[str, Any]:  # fmt: skip
    """Write all tensors; meanwhile hash the source, and return its files.

    A stream is hashed as it comes, unless it is read in part.
    """
    journal = Journal(sink.work / JOURNAL, _digest(job, source), sink.left)
    if journal.resume():
        if not sink.is_whole():
            journal.forget()
    else:
        _check_abandoned(sink, overwrite=options.get("overwrite", False))
        sink.clear()
    sink.create()
    journal.start()
    todo = len(job.rows) - len(journal.done)
    shown = rows_bar(todo, "convert") if options.get("progress") else quiet()
    stop = threading.Event()
    with ThreadPoolExecutor(max_workers=1) as hasher, shown as advance:
        near = [path for path in job.read_files(source) if not source.is_far(path)]
        hashes = hasher.submit(describe_files, near, share.workers, origin.hashes, stop)
        try:
            if source.remote is not None and job.recipe.only is None:
                source.remote.begin()
            device = options.get("device", "cpu")
            run(job, source, sink, journal, Effort(share.workers, device, advance, share.room))
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


__all__ = [
    "Bench",
    "Conversion",
    "FormatError",
    "Limit",
    "LogitsCheck",
    "MissingError",
    "OutputError",
    "Prompt",
    "QuantError",
    "RecipeError",
    "Sweep",
    "bench",
    "convert",
    "imatrix",
    "inspect",
    "plan",
    "quantize",
    "run_text",
    "verify",
]
