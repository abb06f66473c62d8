"""Every container by its name, and the one place that chooses between them.

Adding one: a file that implements `Container`, and `register`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_convert.containers.gguf.container import GgufFiles
from qwen35_convert.containers.safetensors.container import SafetensorsFolder
from qwen35_convert.errors import OutputError, RecipeError

if TYPE_CHECKING:
    from formats.checkpoint import Checkpoint
    from qwen35_convert.containers.container import Container
    from qwen35_convert.planning.plan import Plan
    from qwen35_convert.recipe.parts import Format
    from qwen35_convert.recipe.recipe import Recipe

# A path is offered to each in turn; the folder takes what is left.
CONTAINERS: dict[str, Container] = {one.name: one for one in (GgufFiles(), SafetensorsFolder())}


def register(container: Container, form: Format) -> None:
    """Add a kind of artifact; it is asked before those that are there, by its name and by paths.

    form  what a recipe of this format may say
    """
    from qwen35_convert.recipe.parts import FORMATS

    others = {name: one for name, one in CONTAINERS.items() if name != container.name}
    CONTAINERS.clear()
    CONTAINERS.update({container.name: container} | others)
    FORMATS[container.name] = form


def container_for(path: Path) -> Container:
    """Return the container that an artifact at this path is, or is to be."""
    return next(container for container in CONTAINERS.values() if container.takes(path))


def container_of(checkpoint: Checkpoint) -> Container:
    """Return the container of an opened checkpoint."""
    return CONTAINERS[checkpoint.container]


def open_checkpoint(path: Path, name: str = "") -> Checkpoint:
    """Open whatever is at a path, by its headers. FormatError if it is nothing that is known."""
    return container_for(path).open(path, name)


def default_recipe(
    source: Checkpoint, overrides: Sequence[str] = (), *, out: str | Path = ""
) -> Recipe:
    """Return the recipe that is used when none is named.

    A GGUF file gets gguf-q8_0, a folder fp8-block; a folder made from quantised weights gets
    bf16-split, because they are quantised a second time only on request.
    """
    from qwen35_convert.recipe.recipe import read_recipe

    again = bool(source.layout.quantized)
    return read_recipe(container_for(Path(out)).default_recipe(again=again), overrides)


def check_out(out: Path, source: Checkpoint, *, overwrite: bool) -> None:
    """Raise OutputError before planning, if OUT must not be written, or is named as another kind.

    So is a folder that lies where the user thinks a file is to be.
    """
    container = container_for(out)
    for other in CONTAINERS.values():
        if other is not container and out.suffix.lower() == other.ending != "":
            kind = f"{other.name.upper()} file"
            fix = f"choose a name that is free for a {kind}, or one without {other.ending}"
            raise OutputError(str(out), f"is {container.out}, named as a {kind}", fix=fix)
    container.check_out(out, source, overwrite=overwrite)


def expect(source: Checkpoint, recipe: Recipe, out: Path) -> Plan:
    """Return the artifact that a recipe makes of a source at OUT, before a weight is read.

    FormatError for a source that cannot be converted, RecipeError for what the recipe may not ask.
    """
    from qwen35_convert.planning.dressed import dressed

    container = container_for(out)
    if recipe.export.format != container.name:
        wanted = CONTAINERS[recipe.export.format].out
        raise RecipeError(
            f"recipe {recipe.name}",
            f"writes {recipe.export.format}, but OUT is {out.name}",
            wanted,
            f"name such an OUT, or a recipe that writes {container.name}, "
            f"such as {container.default_recipe(again=False)}",
        )
    widened = container_of(source).widens
    return container.expected(dressed(source, recipe), recipe, out.stem, widened=widened)
