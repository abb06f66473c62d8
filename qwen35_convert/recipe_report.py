"""The bundled recipes as a table, one of them in full, and the schema of all."""

from __future__ import annotations

import re
import sys
from typing import Any

from qwen35_convert.recipe_files import bundled_recipes, find_recipe, header, headline

# Every bundled recipe says so in its head; a test holds them to it.
SIZE = re.compile(r"Size: (?P<size>.+?)\.(?: |$)")
ERROR = re.compile(r"(?P<error>(?:Weight error|KL(?: on [^:.]+)?): .+?)\.?$")


def print_recipe(name: str, *, json: bool) -> None:
    """Print a recipe as it is written, or with every default resolved."""
    if json:
        from qwen35_convert.recipe import read_recipe
        from qwen35_convert.report import print_json

        print_json({"recipe": read_recipe(name).model_dump(mode="json")})
    else:
        sys.stdout.write(find_recipe(name).read_text(encoding="utf-8"))


def print_recipes(*, json: bool) -> None:
    """Print the bundled recipes: what each is for, its size and its error."""
    if json:
        from qwen35_convert.report import print_json

        print_json({"recipes": [recipe_row(name) for name in bundled_recipes()]})
        return
    for name in bundled_recipes():
        sys.stdout.write(f"{name:<16} {headline(name)}\n")


def recipe_row(name: str) -> dict[str, Any]:
    """Return a line of the table of bundled recipes."""
    from qwen35_convert.recipe import read_recipe

    recipe = read_recipe(name)
    text = header(name).replace("\n", " ")
    size, error = SIZE.search(text), ERROR.search(text)
    return {
        "name": name,
        "use": headline(name),
        "format": recipe.export.format,
        "scheme": recipe.quantize.scheme,
        "method": recipe.quantize.method,
        "layout": recipe.layout,
        "vision": recipe.vision,
        "mtp": recipe.mtp,
        "size": size["size"] if size else None,
        "error": error["error"] if error else None,
    }


def print_schema() -> None:
    """Print the JSON Schema of recipes."""
    from qwen35_convert.recipe_schema import recipe_schema
    from qwen35_convert.write.receipt import dump_json

    sys.stdout.write(dump_json(recipe_schema()).decode())
