"""The options of `convert` that say how large an artifact may be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qwen35_convert.commands.options import parse_bytes

if TYPE_CHECKING:
    from qwen35_convert.fit.goal import Fitted, Goal
    from qwen35_convert.recipe.recipe import Recipe

GOALS = "--fit, --target-size or --target-bpw"
CONTEXT = 4096
Fit = Annotated[
    str | None,
    typer.Option(
        "--fit",
        metavar="SIZE",
        help="Choose types or schemes so that the model fits into this memory, e.g. 16GB.",
    ),
]
Context = Annotated[
    int | None,
    typer.Option(min=1, help="With --fit: tokens of each sequence.", show_default="4096"),
]
Batch = Annotated[
    int | None, typer.Option(min=1, help="With --fit: sequences at once.", show_default="1")
]
TargetSize = Annotated[
    str | None,
    typer.Option(
        "--target-size",
        metavar="SIZE",
        help="Choose them so that the files have at most this size, e.g. 15GB.",
    ),
]
TargetBits = Annotated[
    float | None,
    typer.Option("--target-bpw", metavar="X", help="Choose them for at most X bits per weight."),
]
Table = Annotated[
    Path | None,
    typer.Option(
        "--sensitivity",
        metavar="FILE|by-role",
        help="Costs to choose by: a file of qwen35 sensitivity, or by-role, without measuring.",
        show_default="measured first",
    ),
]
SaveRecipe = Annotated[
    Path | None, typer.Option("--save-recipe", metavar="FILE", help="Write the chosen recipe.")
]


def goal_of(
    memory: str | None,
    serving: tuple[int | None, int | None],
    size: str | None,
    bits: float | None,
    table: Path | None,
) -> Goal | None:
    """Return the size that is asked for; None: there is none. RecipeError for several.

    serving  context and batch
    """
    from qwen35_convert.errors import RecipeError

    context, batch = serving
    if memory is None and (context or batch):
        raise RecipeError("--context and --batch", "are for --fit", "--fit SIZE")
    if memory is None and size is None and bits is None:
        return None
    from qwen35_convert.fit.by_role import BY_ROLE
    from qwen35_convert.fit.goal import Goal

    by_role = table is not None and str(table) == BY_ROLE
    return Goal(
        None if memory is None else parse_bytes("--fit", memory),
        None if size is None else parse_bytes("--target-size", size),
        bits,
        context or CONTEXT,
        batch or 1,
        None if by_role else table,
        by_role,
    )


def keep_fitted(fitted: Fitted, save: Path | None, *, progress: bool) -> Recipe:
    """Return the recipe that fits; say what is expected of it, and keep it if that is asked for."""
    from qwen35_convert.durable import save_file

    if progress:
        print(f"fit: {fitted.told}", file=sys.stderr)
    if save:
        save_file(save, fitted.content())
    return fitted.recipe
