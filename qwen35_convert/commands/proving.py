"""An artifact against its source."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from formats.errors import FELL_SHORT
from qwen35_convert import completion
from qwen35_convert.commands.options import (
    BUNDLED,
    Base,
    Html,
    Json,
    Junit,
    LogitsCache,
    Memory,
    OutputFormat,
    Quiet,
    Workers,
    merged,
    parse_limit,
    text_option,
)
from qwen35_convert.options import RunOptions
from qwen35_convert.output import JSON, Output

if TYPE_CHECKING:
    from qwen35_convert.verification.verify import Report


def verify(
    artifact: Annotated[
        str | None, typer.Argument(help="Folder or file to verify.", show_default=False)
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Source it was made from.")
    ] = None,
    base: Base = None,
    level: Annotated[
        str,
        typer.Option(help="structure, tensors or logits.", autocompletion=completion.levels),
    ] = "tensors",
    text: Annotated[str, text_option("Text for level logits.")] = BUNDLED,
    max_kl: Annotated[
        float | None, typer.Option(help="Maximum mean KL divergence, in nats per token.")
    ] = None,
    min_top1: Annotated[float | None, typer.Option(help="Minimum top-1 agreement, 0 to 1.")] = None,
    logits_cache: LogitsCache = None,
    by_bounds: Annotated[
        bool,
        typer.Option(
            "--by-bounds",
            help="Judge calibrated weights by bounds; do not calibrate again.",
        ),
    ] = False,
    html: Html = None,
    workers: Workers = None,
    memory_limit: Memory = None,
    list_checks: Annotated[
        bool, typer.Option("--list-checks", help="List what is checked at which level, and stop.")
    ] = False,
    json: Json = False,
    output_format: OutputFormat = None,
    junit: Junit = None,
    quiet: Quiet = False,
) -> None:
    """Verify an artifact's structure, values and predictions.

    Example: qwen35 verify ./Qwen3.5-27B-FP8 --against Qwen/Qwen3.5-27B
    """
    from qwen35_convert import api, report
    from qwen35_convert.errors import RecipeError
    from qwen35_convert.verification.logits import LogitsCheck

    output = Output.of("verify", output_format, junit, json=json)
    if list_checks:
        report.print_checks(json=output.form == JSON)
        return
    if artifact is None:
        raise RecipeError("ARTIFACT is missing", expected="a folder or file to verify")
    if base is not None and against is None:
        raise RecipeError("--base", "names a model alone", "--against ADAPTER --base SOURCE")
    if html is not None:
        _check_page(html, given=against is not None)
    limit = parse_limit(memory_limit)
    result = api.verify(
        artifact,
        against and merged(against, base),
        level=level,
        logits=LogitsCheck(text, max_kl, min_top1, cache=logits_cache),
        options=RunOptions(workers=workers, memory_limit=limit, progress=not quiet),
        by_bounds=by_bounds,
    )
    if html is not None:
        _save_page(html, artifact, str(against), text, result)
    output.verification(result, artifact)
    if not result.passed:
        if against is not None and not quiet:
            _ask_if_swapped(artifact, against)
        raise typer.Exit(FELL_SHORT)


def _ask_if_swapped(artifact: str, against: str) -> None:
    """Print a note if the source has a receipt, as artifacts have, and the artifact has none."""
    from qwen35_convert.containers.registry import container_for

    def has_receipt(path: str) -> bool:
        return container_for(Path(path)).receipt_of(Path(path)).is_file()

    if has_receipt(against) and not has_receipt(artifact):
        print(
            f"note: {against} has a receipt and {artifact} has none; if {against} was made from "
            f"{artifact}: qwen35 verify {against} --against {artifact}",
            file=sys.stderr,
        )


def _check_page(html: Path, *, given: bool) -> None:
    """Refuse a page that could not be written, or on which nothing would be. RecipeError."""
    from qwen35_convert.durable import check_place
    from qwen35_convert.errors import RecipeError
    from qwen35_convert.heads import PAGE

    if not given:
        raise RecipeError("--html", "shows an artifact beside its source", "--against SOURCE")
    check_place(html, PAGE.encode())


def _save_page(html: Path, artifact: str, source: str, text: str, result: Report) -> None:
    from qwen35_convert.comparison.result import Comparison, Entry
    from qwen35_convert.durable import save_file
    from qwen35_convert.page.page import page_html

    names = [Path(one).resolve().name for one in (artifact, source)]
    comparison = Comparison.of(names[1], text, [Entry(names[0], result)])
    save_file(html, page_html(comparison).encode())
