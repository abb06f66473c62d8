"""What a checkpoint holds."""

from __future__ import annotations

from typing import Annotated

import typer

from qwen35_convert import completion
from qwen35_convert.commands.options import (
    Base,
    Json,
    Source,
    merged,
    parse_bytes,
)


def inspect(
    source: Source,
    base: Base = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Tokens of each sequence: show the memory that serving needs.",
            show_default="4096, with --batch or --memory",
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Number of sequences served at once.",
            show_default="1, with --context or --memory",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory of the device, e.g. 16GB: show what fits."),
    ] = None,
    serving: Annotated[
        str | None,
        typer.Option(
            metavar="ENGINE",
            help="Show all command lines of vllm, sglang, transformers, llama.cpp or ollama.",
            autocompletion=completion.engines,
        ),
    ] = None,
    json: Json = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
) -> None:
    """Show what a checkpoint holds, and how to serve it.

    Example: qwen35 inspect ./Qwen3.5-27B-FP8 --context 32768 --batch 8 --memory 80GB
    """
    from qwen35_convert import report
    from qwen35_convert.inspection.source import inspect as inspected
    from qwen35_convert.options import check_choice
    from qwen35_convert.serving.engines import ENGINES

    if serving is not None:
        check_choice("--serving", serving, tuple(ENGINES))
    size = None if memory is None else parse_bytes("--memory", memory)
    inspection = inspected(merged(source, base), context=context, batch=batch, memory=size)
    if json:
        report.print_json(inspection.as_dict(tensors=tensors))
    elif serving is not None:
        report.print_start(inspection, serving)
    else:
        report.print_inspection(inspection, tensors=tensors)
