"""What weights cost in fewer bits."""

from __future__ import annotations

from typing import Annotated

import typer

from qwen35_convert.commands.options import (
    BUNDLED,
    Base,
    Json,
    OutFile,
    OverwriteFile,
    Quiet,
    Set,
    Source,
    Workers,
    merged,
    recipe_option,
    text_option,
)
from qwen35_convert.options import RunOptions


def sensitivity(
    source: Source,
    out: OutFile,
    text: Annotated[str, text_option("Text to measure on.")] = BUNDLED,
    chunks: Annotated[
        int, typer.Option(min=1, max=16, help="Maximum number of 512-token chunks.")
    ] = 4,
    recipe: Annotated[
        str, recipe_option("Recipe whose format and layout are measured.")
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
    overwrite: OverwriteFile = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict the KL divergence that each type or scheme costs.

    Example: qwen35 sensitivity ./Qwen3.5-9B --text calibration.txt -o sensitivity.json
    """
    from qwen35_convert import measuring, report
    from qwen35_convert.errors import RecipeError
    from qwen35_convert.fit.question import Question

    names = tuple(word.strip() for word in (forms or "").split(",") if word.strip())
    if forms is not None and not names:
        raise RecipeError("--forms", f"is {forms!r}", "types or schemes, such as q4_k,q6_k")
    table = measuring.sensitivity(
        merged(source, base),
        out,
        recipe,
        Question(text, chunks, names),
        RunOptions(workers=workers, overwrite=overwrite, progress=not quiet),
        overrides=tuple(set_ or ()),
    )
    if json:
        report.print_json(dict(table.values))
    else:
        report.print_sensitivity(table, out)
