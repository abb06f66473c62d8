"""The Python API: what the commands do, with typed arguments and results.

Each function raises a ValueError kin for what a caller can cause: RecipeError (misused),
FormatError, QuantError and FetchError (input refused), OutputError (output refused), MissingError
(the machine lacks something).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Unpack

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from quant.errors import QuantError
from qwen35_convert.benchmarking.bench import Bench, Sweep, run_bench
from qwen35_convert.containers.gguf.imatrix_file import ImatrixReport, make_imatrix
from qwen35_convert.containers.registry import container_for, expect
from qwen35_convert.conversion import (
    Conversion,
    Limits,
    Options,
    digest_of,
    verify_shown,
    write_artifact,
)
from qwen35_convert.errors import MissingError, OutputError, RecipeError
from qwen35_convert.hub.fetch import Fetched, fetch, parse_repo
from qwen35_convert.inspection.inspect import Inspection, inspect_checkpoint
from qwen35_convert.planning.plan import Plan
from qwen35_convert.progress import quiet, rows_bar, say
from qwen35_convert.recipe import Recipe, build_recipe, read_recipe
from qwen35_convert.run.executor import Means, open_engine
from qwen35_convert.run.memory import Limit, fit_memory, fit_verification
from qwen35_convert.source import open_headers, open_source
from qwen35_convert.text.generation import Prompt, generate_text
from qwen35_convert.text.tokens import DEFAULT
from qwen35_convert.verification.logits import MEASURED_ONLY, LogitsCheck, token_rows
from qwen35_convert.verification.verify import Checks, Report

MAX_DEFAULT_WORKERS = 8


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
    source: str | Path,
    recipe: Recipe | None = None,
    *,
    overrides: tuple[str, ...] = (),
    out: str | Path = "model",
    stream: bool = False,
) -> Plan:
    """Return the plan of a conversion to `out`; nothing is written.

    Of a source on the hub come headers and the few values that planning looks at, by ranges; or the
    cache's copy is used, unless `stream` is asked for.
    """
    opened = open_headers(source, stream=stream)
    return expect(opened, recipe or default_recipe(opened, overrides, out=out), Path(out))


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
    again = bool(source.layout.quantized)
    return read_recipe(container_for(Path(out)).default_recipe(again=again), overrides)


def quantize_recipe(scheme: str, overrides: tuple[str, ...] = ()) -> Recipe:
    """Return the recipe of `quantize`: names and layout stay as they are."""
    return build_recipe(
        {
            "name": "quantize",
            "layout": "same",
            "experts": "same",
            "mtp": "keep",
            "vision": "keep",
            "quantize": {"scheme": scheme},
        },
        overrides,
    )


def convert(
    source: str | Path, out: str | Path, recipe: Recipe | None = None, **options: Unpack[Options]
) -> Conversion:
    """Convert a checkpoint into the folder or the GGUF file `out`; verify it against its source.

    An interrupted call is resumed by the same call. Nothing appears at `out` before it is complete.
    """
    out = Path(out)
    device = options.get("device", "cpu")
    _check_device(device)
    progress, stream = options.get("progress", False), options.get("stream", False)
    opened, origin = open_source(source, progress=progress, stream=stream)
    overwrite, engine = options.get("overwrite", False), options.get("engine", "threads")
    if stream and engine != "threads":
        raise RecipeError(f"engine {engine} reads files of a shared file system, not a stream")
    container = container_for(out)
    container.check_out(out, opened, overwrite=overwrite)
    chosen = recipe or default_recipe(opened, options.get("overrides", ()), out=out)
    job = expect(opened, chosen, out)
    if container.finish(out, job, digest_of(job, opened)):
        receipt = container.receipt_of(out).read_bytes()
        return Conversion(out, job, receipt, None)
    container.check_files(out, job, opened, overwrite=overwrite)
    if options.get("verify", True):
        container.check_verifiable(job)
    if options.get("verify", True) and job.recipe.verify.level == "logits":
        token_rows(opened, job.recipe.verify.text)  # refused now, not after the work
    options.get("on_plan", _keep_quiet)(job)
    workers, limit = options.get("workers"), options.get("memory_limit")
    share = fit_memory(
        job, opened, limit, _workers(opened, options), verify=options.get("verify", True)
    )
    heard = say if progress else _keep_quiet
    place = opened.folder if origin.repo else Path(source)
    with open_engine(engine, place, workers=workers, limit=limit) as convert_rows:
        means = Means(convert_rows, share, device, progress, heard)
        return write_artifact(job, opened, origin, out, means, options)


def _keep_quiet(_: object) -> None:
    """Keep quiet about a plan, or about what happens."""


def quantize(
    source: str | Path, out: str | Path, scheme: str, **options: Unpack[Options]
) -> Conversion:
    """Quantise a checkpoint; its names and layout stay as they are."""
    return convert(source, out, quantize_recipe(scheme), **options)


def verify(
    artifact: str | Path,
    against: str | Path | None = None,
    *,
    level: str = "tensors",
    logits: LogitsCheck = MEASURED_ONLY,
    progress: bool = False,
    **limits: Unpack[Limits],
) -> Report:
    """Verify an artifact, against its source if that is named."""
    source = open_source(against)[0] if against else None
    workers = limits.get("workers") or default_workers()
    fit = fit_verification(source, limits.get("memory_limit"), workers)
    checks = Checks(level, logits, fit)
    return verify_shown(Path(artifact), source, checks, bar=progress)


def imatrix(
    source: str | Path,
    out: str | Path,
    *,
    text: str = DEFAULT,
    chunks: int | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> ImatrixReport:
    """Collect an importance matrix over a text and write llama.cpp's imatrix file."""
    opened, _ = open_source(source)
    layers = len(opened.config.layer_types) + opened.layout.form.mtp_layers
    with rows_bar(layers, "imatrix") if progress else quiet() as advance:
        return make_imatrix(
            opened,
            text,
            Path(out),
            chunks=chunks,
            overwrite=overwrite,
            progress=lambda _: advance(),
        )


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


def _workers(source: Checkpoint, options: Options) -> int:
    """Return the number of threads. A stream has one reader unless more are asked for.

    More of them stand at places further apart than the memory reaches, and read blocks twice; the
    network is slower than one thread.
    """
    return options.get("workers") or (default_workers() if source.remote is None else 1)


__all__ = [
    "Bench",
    "Conversion",
    "FormatError",
    "Limit",
    "LogitsCheck",
    "MissingError",
    "Options",
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
