"""What weights cost in fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwen35_convert import completion
from qwen35_convert.commands.options import Base, Json, Quiet, Set, Source, Workers, merged
from qwen35_convert.options import RunOptions


def sensitivity(
    source: Source,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.", show_default=False)],
    text: Annotated[
        str, typer.Option(metavar="FILE", help="Text to measure on.", show_default="bundled")
    ] = "default",
    chunks: Annotated[
        int, typer.Option(min=1, max=16, help="Maximum number of 512-token chunks.")
    ] = 4,
    recipe: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Recipe whose format and layout are measured.",
            autocompletion=completion.recipe_names,
        ),
    ] = "gguf-q8_0",
    set_: Set = None,
    forms: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Types or schemes to measure.", show_default="those of the format"
        ),
    ] = None,
    base: Base = None,
    workers: Workers = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict the KL divergence that each type or scheme costs, weight by weight.

    Example: qwen35 sensitivity ./Qwen3.5-9B --text calibration.txt -o sensitivity.json
    """
    from qwen35_convert import api, report

    names = tuple(word.strip() for word in (forms or "").split(",") if word.strip())
    table = api.sensitivity(
        merged(source, base),
        out,
        recipe,
        api.Question(text, chunks, names),
        RunOptions(workers=workers, overwrite=overwrite, progress=not quiet),
        overrides=tuple(set_ or ()),
    )
    if json:
        report.print_json(dict(table.values))
    else:
        report.print_sensitivity(table, out)
