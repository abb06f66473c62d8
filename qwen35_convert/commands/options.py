"""The arguments and options that several commands share, and what their texts mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qwen35_convert import completion

if TYPE_CHECKING:
    from qwen35_convert.options import Limit
    from qwen35_convert.source import Source as SourceOf

DEFAULT_MEMORY = 600 * 10**6
MAX_DIGITS = 9

BUNDLED = "default"

DEFAULT_RECIPES = "fp8-block; bf16-split for quantised input; gguf-q8_0 for a .gguf"
Source = Annotated[
    str, typer.Argument(help="Folder, .safetensors or .gguf file, or owner/name[@revision].")
]
Out = Annotated[
    Path, typer.Option("-o", "--out", help="Folder or .gguf file to write.", show_default=False)
]
OutFile = Annotated[Path, typer.Option("-o", "--out", help="File to write.", show_default=False)]
Base = Annotated[
    str | None,
    typer.Option(
        metavar="SOURCE", help="Model to merge an adapter (LoRA) into; SOURCE is then the adapter."
    ),
]
Template = Annotated[
    Path | None,
    typer.Option("--chat-template", metavar="FILE", help="Chat template to replace the source's."),
]
Metadata = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSON with general.license, general.tags, ... instead of those of README.md.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change one recipe key, e.g. quantize.scale=float32. Repeatable.",
    ),
]
PlanOnly = Annotated[bool, typer.Option("--plan", help="Print the plan and stop.")]
Workers = Annotated[
    int | None,
    typer.Option(min=1, max=256, help="Number of threads.", show_default="cores, at most 8"),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="Keep memory below SIZE, e.g. 600MB, with fewer threads if necessary.",
        show_default="600MB, or 3/4 of free memory",
    ),
]
Device = Annotated[
    str, typer.Option(help="Quantise on cpu or cuda.", autocompletion=completion.devices)
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the model at OUT.")]
OverwriteFile = Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Skip verification after writing.")]
Stream = Annotated[
    bool,
    typer.Option(
        "--stream",
        help="Read from the hub by range requests, without a local copy; one thread by default.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
LogitsCache = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Keep the source's predictions in DIR for later runs."),
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a self-contained HTML page with charts."),
]
OutputFormat = Annotated[
    str | None,
    typer.Option(
        "--output-format",
        metavar="text|json|github",
        help="json: as --json. github: text, and annotations for GitHub Actions.",
        show_default="text",
        autocompletion=completion.forms,
    ),
]
Junit = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write the results as JUnit XML.")
]
Quiet = Annotated[
    bool, typer.Option("-q", "--quiet", help="Show no progress and no notes on stderr.")
]


def text_option(use: str) -> Any:
    """Return the option that names a text for this use; `BUNDLED` is its default."""
    return typer.Option(metavar="FILE", help=use, show_default="bundled")


def recipe_option(use: str, show_default: str | bool = True) -> Any:
    """Return the option that names a recipe for this use."""
    return typer.Option(
        metavar="NAME|FILE",
        help=use,
        show_default=show_default,
        autocompletion=completion.recipe_names,
    )


def parse_limit(size: str | None) -> Limit:
    """Return the limit that `600MB` sets; without one, the default, which may be exceeded."""
    from qwen35_convert.errors import RecipeError
    from qwen35_convert.options import Limit

    if size is None:
        return Limit(DEFAULT_MEMORY, firm=False)
    limit = parse_bytes("--memory-limit", size)
    if not limit:
        raise RecipeError("--memory-limit", f"is {size}", "a size above 0, such as 600MB")
    return Limit(limit)


def parse_bytes(option: str, size: str) -> int:
    """Return the bytes of `16GB`, as an option says it. RecipeError for anything else."""
    from qwen35_convert.errors import RecipeError
    from qwen35_convert.sizes import parse_size

    try:
        return parse_size(size)
    except ValueError as error:
        raise RecipeError(f"{option}: {error}") from None


def parse_numbers(name: str, text: str) -> tuple[int, ...]:
    """Return the numbers of `1,8,64`; none for an empty text. RecipeError for anything else."""
    from qwen35_convert.errors import RecipeError

    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isascii() and word.isdigit() and len(word) <= MAX_DIGITS for word in words):
        raise RecipeError(f"--{name}", f"is {text!r}", "numbers such as 1,8,64")
    return tuple(int(word) for word in words)


def merged(source: str, base: str | None) -> SourceOf:
    """Return what is to be opened: a model, or an adapter and its model."""
    from qwen35_convert.source import Merge

    return source if base is None else Merge(source, base)
