"""The bundled recipes as the rows of a table: use, size and error, as their heads say them."""

from __future__ import annotations

import re
from typing import Any

from qwen35_convert.recipe.files import header, headline
from qwen35_convert.recipe.recipe import read_recipe

# Every bundled recipe says so in its head; a test holds them to it.
SIZE = re.compile(r"Size: (?P<size>.+?)\.(?: |$)")
ERROR = re.compile(r"(?P<error>(?:Weight error|KL(?: on [^:.]+)?): .+?)\.?$")


def recipe_row(name: str) -> dict[str, Any]:
    """Return a line of the table of bundled recipes."""
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
