"""What a model is used for: text, times, an importance matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qwen35_convert.commands.options import (
    BUNDLED,
    Base,
    Json,
    OutFile,
    OverwriteFile,
    Quiet,
    Source,
    merged,
    parse_numbers,
    text_option,
)


def imatrix(
    source: Source,
    out: OutFile,
    text: Annotated[str, text_option("Calibration text.")] = BUNDLED,
    chunks: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of 512-token chunks.", show_default="all"),
    ] = None,
    base: Base = None,
    overwrite: OverwriteFile = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compute an importance matrix for GGUF recipes.

    Use it with --set quantize.imatrix=FILE.

    Example: qwen35 imatrix Qwen/Qwen3.5-35B-A3B --text calibration.txt -o imatrix.gguf
    """
    from qwen35_convert import measuring, report

    matrix = measuring.imatrix(
        merged(source, base), out, text=text, chunks=chunks, overwrite=overwrite, progress=not quiet
    )
    if json:
        report.print_json(matrix.as_dict())
    else:
        report.print_imatrix(matrix, notes=not quiet)


def bench(
    artifact: Source,
    prefill: Annotated[str, typer.Option(metavar="N,N", help="Prompt lengths.")] = "512,8192",
    batch: Annotated[
        str, typer.Option(metavar="N,N", help="Batch sizes of decode steps.")
    ] = "1,8,64",
    context: Annotated[int, typer.Option(help="Context of each sequence in a decode step.")] = 4096,
    device: Annotated[str, typer.Option(help="cuda, or cpu for the reference path.")] = "cuda",
    peer: Annotated[
        str | None,
        typer.Option(help="Also time the same weights in transformers, fla or vllm."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a roofline plot (png, svg, pdf).")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Time an artifact and compare it with the hardware limit.

    Example: qwen35 bench ./Qwen3.5-27B-FP8 --batch 1,8 --plot roofline.png
    """
    from qwen35_convert import measuring, report
    from qwen35_convert.benchmarking.roofline import check_plot, draw_roofline
    from qwen35_convert.benchmarking.sweep import Sweep

    sweep = Sweep(
        parse_numbers("prefill", prefill), parse_numbers("batch", batch), context, device, peer=peer
    )
    if plot is not None:
        check_plot(plot)
    measured = measuring.bench(artifact, sweep, progress=not quiet)
    if plot is not None:
        draw_roofline(measured, plot)
    if json:
        report.print_json(measured.as_dict())
    else:
        report.print_bench(measured)


def run(
    artifact: Source,
    prompt: Annotated[str, typer.Option(help="Prompt text.")],
    chat: Annotated[bool, typer.Option("--chat", help="Apply the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 256,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16.", show_default="float32; bfloat16 on a GPU"),
    ] = None,
    speculate: Annotated[
        int,
        typer.Option(min=0, max=3, help="Tokens that the MTP head drafts in each step; 0: none."),
    ] = 0,
) -> None:
    """Generate text from an artifact.

    Only the text goes to stdout.

    Example: qwen35 run ./Qwen3.5-27B-FP8 --chat --prompt "Why is the sky blue?"
    """
    from qwen35_convert import api
    from qwen35_convert.text.generation import Prompt

    request = Prompt(prompt, chat, max_tokens, temperature, seed, speculate, dtype)
    for piece in api.run_text(artifact, request, progress=True):
        print(piece, end="", flush=True)
    print()
