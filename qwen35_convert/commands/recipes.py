"""The bundled recipes, one of them in full, the schema of all; and the mistakes in one."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from formats.errors import MISUSED
from qwen35_convert import completion
from qwen35_convert.commands.options import Json, Junit, OutputFormat
from qwen35_convert.output import JSON, Output
from qwen35_convert.recipe.files import bundled_recipes, find_recipe, headline


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="Recipe to print.", autocompletion=completion.recipe_names),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="List every mistake in a recipe; exit 2 if there are any."
        ),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of recipes, for editors.")
    ] = False,
    json: Json = False,
    output_format: OutputFormat = None,
    junit: Junit = None,
) -> None:
    """List the bundled recipes, print one, or check your own.

    Example: qwen35 recipes --check ours.yaml
    """
    output = Output.of("recipes", output_format, junit, json=json)
    if check is not None:
        from qwen35_convert.recipe.check import check_recipe

        mistakes = check_recipe(check)
        output.mistakes(check, mistakes)
        if mistakes:
            raise typer.Exit(MISUSED)
    elif schema:
        _print_schema()
    elif name:
        _print_recipe(name, json=output.form == JSON)
    else:
        _print_recipes(json=output.form == JSON)


def _print_schema() -> None:
    from qwen35_convert.recipe.schema import recipe_schema
    from qwen35_convert.write.receipt import dump_json

    sys.stdout.write(dump_json(recipe_schema()).decode())


def _print_recipe(name: str, *, json: bool) -> None:
    """Print a recipe as it is written, or with every default resolved."""
    if json:
        from qwen35_convert.recipe.recipe import read_recipe
        from qwen35_convert.report import print_json

        print_json({"recipe": read_recipe(name).model_dump(mode="json")})
    else:
        sys.stdout.write(find_recipe(name).read_text(encoding="utf-8"))


def _print_recipes(*, json: bool) -> None:
    """Print the bundled recipes: what each is for, its size and its error."""
    if json:
        from qwen35_convert.recipe.rows import recipe_row
        from qwen35_convert.report import print_json

        print_json({"recipes": [recipe_row(name) for name in bundled_recipes()]})
        return
    names = bundled_recipes()
    for name in names:
        sys.stdout.write(f"{name:<{max(map(len, names))}}  {headline(name)}\n")
