"""The `qwen35` command. A command parses, makes one call of `qwen35_convert.api`, prints.

Results go to stdout, progress and warnings to stderr. Exit codes: 0 done, 1 verification fell
short, 2 misused, 3 input refused, 4 output refused, 5 this machine lacks something, 130
interrupted. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from formats.errors import FELL_SHORT, INPUT, INTERRUPTED, Qwen35Error

if TYPE_CHECKING:
    from qwen35_convert.api import Options
    from qwen35_convert.planning.plan import Plan
    from qwen35_convert.recipe import Recipe
    from qwen35_convert.run.memory import Limit

app = typer.Typer(
    name="qwen35",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
    help="Convert, quantise and prove Qwen3.5-family checkpoints.",
)

MAX_MESSAGE = 4000
DEFAULT_MEMORY = 600 * 10**6
STOPPED = "qwen35: interrupted\n  left  the same command goes on where it stopped"

DEFAULTS = "fp8-block; bf16-split for quantised input; gguf-q8_0 for a .gguf"
Source = Annotated[
    str, typer.Argument(help="Folder, .safetensors or .gguf file, or owner/name[@revision].")
]
Out = Annotated[
    Path, typer.Option("-o", "--out", help="Folder or .gguf file to write.", show_default=False)
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
    int | None, typer.Option(min=1, max=256, help="Threads.", show_default="cores, at most 8")
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        metavar="SIZE",
        help="Memory to stay within, e.g. 600MB; fewer threads if it must be.",
        show_default="600MB, or 3/4 of what is free",
    ),
]
Device = Annotated[str, typer.Option(help="Where to quantise: cpu or cuda.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a model at OUT.")]
NoVerify = Annotated[bool, typer.Option("--no-verify", help="Do not verify after writing.")]
Stream = Annotated[
    bool,
    typer.Option(
        "--stream", help="Read from the hub by ranges, no copy on the disk; one thread by default."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def inspect(
    source: Source,
    json: Json = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
) -> None:
    """Say what a checkpoint is: sizes, layout, problems, how to serve it.

    Example: qwen35 inspect Qwen/Qwen3.5-0.8B
    """
    from qwen35_convert import api, report

    found = api.inspect(source)
    if json:
        report.print_json(found.as_dict(tensors=tensors))
    else:
        report.print_inspection(found, tensors=tensors)


@app.command()
def download(
    repo: Annotated[str, typer.Argument(help="owner/name on the hub.")],
    out: Out,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
) -> None:
    """Fetch the files a conversion needs, checked by size and hash.

    Example: qwen35 download Qwen/Qwen3.5-0.8B -o Qwen3.5-0.8B
    """
    from qwen35_convert import api

    fetched = api.download(repo, out, revision=revision, progress=True)
    print(f"{fetched.path}: {len(fetched.files)} files of {fetched.repo}@{fetched.revision}")


@app.command()
def convert(
    source: Source,
    out: Out,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME|FILE", help="Recipe.", show_default=DEFAULTS)
    ] = None,
    set_: Set = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="GLOB",
            help="Convert these tensors only, e.g. 'layers.0.*': a slice to look at.",
        ),
    ] = None,
    plan: PlanOnly = False,
    workers: Workers = None,
    memory_limit: Memory = None,
    device: Device = "cpu",
    stream: Stream = False,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    engine: Annotated[
        str,
        typer.Option(
            help="threads, or ray: the nodes of the cluster at RAY_ADDRESS, or of a local one. "
            "Threads and memory are then each node's."
        ),
    ] = "threads",
    json: Json = False,
) -> None:
    """Convert a checkpoint by a recipe, then verify the result against its source.

    Example: qwen35 convert Qwen/Qwen3.5-27B -o Qwen3.5-27B-FP8 --recipe fp8-block
    """
    from qwen35_convert.recipe import quoted, read_recipe

    changes = (*(set_ or ()), *([f"only={quoted(only)}"] if only else ()))
    chosen = read_recipe(recipe, changes) if recipe else None
    options: Options = {
        "overrides": changes,
        "workers": workers,
        "memory_limit": _limit(memory_limit),
        "device": device,
        "stream": stream,
        "overwrite": overwrite,
        "verify": not no_verify,
        "engine": engine,
    }
    _convert(source, out, chosen, options, plan=plan, json=json)


@app.command()
def quantize(
    source: Source,
    out: Out,
    scheme: Annotated[str, typer.Option(help="fp8-block or fp8-channel.")],
    set_: Set = None,
    plan: PlanOnly = False,
    workers: Workers = None,
    memory_limit: Memory = None,
    device: Device = "cpu",
    stream: Stream = False,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    json: Json = False,
) -> None:
    """Quantise a checkpoint; names and layout stay as they are.

    Example: qwen35 quantize ./Qwen3.5-9B -o ./Qwen3.5-9B-FP8 --scheme fp8-block
    """
    from qwen35_convert.api import quantize_recipe

    options: Options = {
        "workers": workers,
        "memory_limit": _limit(memory_limit),
        "device": device,
        "stream": stream,
        "overwrite": overwrite,
        "verify": not no_verify,
    }
    recipe = quantize_recipe(scheme, tuple(set_ or ()))
    _convert(source, out, recipe, options, plan=plan, json=json)


def _convert(
    source: str, out: Path, recipe: Recipe | None, options: Options, *, plan: bool, json: bool
) -> None:
    from qwen35_convert import api, report

    if plan:
        overrides, stream = options.get("overrides", ()), options.get("stream", False)
        made = api.plan(source, recipe, overrides=overrides, out=out, stream=stream)
        _print_plan(made, json=json)
        return
    shown: Options = {"progress": True, "on_plan": report.print_notes}
    done = api.convert(source, out, recipe, **(options | shown))
    if json:
        report.print_json(done.as_dict())
    else:
        report.print_conversion(done)
    if done.report and not done.report.passed:
        raise typer.Exit(FELL_SHORT)


def _print_plan(plan: Plan, *, json: bool) -> None:
    from qwen35_convert import report

    if json:
        report.print_json(report.plan_as_dict(plan))
    else:
        print(report.plan_text(plan))


@app.command()
def verify(
    artifact: Annotated[str, typer.Argument(help="The folder or file to prove.")],
    against: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="What it was made from.")
    ] = None,
    level: Annotated[str, typer.Option(help="structure, tensors or logits.")] = "tensors",
    text: Annotated[
        str, typer.Option(metavar="FILE", help="Text for level logits.", show_default="bundled")
    ] = "default",
    max_kl: Annotated[float | None, typer.Option(help="Largest mean KL, nats per token.")] = None,
    min_top1: Annotated[float | None, typer.Option(help="Least top-1 agreement, 0 to 1.")] = None,
    logits_cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep what the source's layers compute."),
    ] = None,
    workers: Workers = None,
    memory_limit: Memory = None,
    json: Json = False,
) -> None:
    """Prove an artifact: its structure, every value, its predictions against the source's.

    Example: qwen35 verify ./Qwen3.5-27B-FP8 --against Qwen/Qwen3.5-27B
    """
    from qwen35_convert import api, report

    asked = api.LogitsCheck(text, max_kl, min_top1, logits_cache)
    found = api.verify(
        artifact,
        against,
        level=level,
        logits=asked,
        workers=workers,
        memory_limit=_limit(memory_limit),
        progress=True,
    )
    if json:
        report.print_json(found.as_dict())
    else:
        report.print_report(found)
    if not found.passed:
        raise typer.Exit(FELL_SHORT)


@app.command()
def imatrix(
    source: Source,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.", show_default=False)],
    text: Annotated[
        str, typer.Option(metavar="FILE", help="Text to run.", show_default="bundled")
    ] = "default",
    chunks: Annotated[
        int | None, typer.Option(min=1, help="At most so many of 512 tokens.", show_default="all")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    json: Json = False,
) -> None:
    """Measure what an error in each column costs, for quantize.imatrix of a GGUF recipe.

    Example: qwen35 imatrix Qwen/Qwen3.5-35B-A3B --text calibration.txt -o imatrix.gguf
    """
    from qwen35_convert import api, report

    made = api.imatrix(source, out, text=text, chunks=chunks, overwrite=overwrite, progress=True)
    if json:
        report.print_json(made.as_dict())
    else:
        report.print_imatrix(made)


@app.command()
def bench(
    artifact: Source,
    prefill: Annotated[str, typer.Option(metavar="N,N", help="Lengths of prompts.")] = "512,8192",
    batch: Annotated[str, typer.Option(metavar="N,N", help="Sequences at once.")] = "1,8,64",
    context: Annotated[int, typer.Option(help="Tokens of each while decoding.")] = 4096,
    device: Annotated[str, typer.Option(help="cuda or cpu (the reference path).")] = "cuda",
    peer: Annotated[
        str | None,
        typer.Option(help="Time it beside on the same weights: transformers, fla or vllm."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the roofline (png, svg, pdf).")
    ] = None,
    json: Json = False,
) -> None:
    """Time an artifact here, and say how near the least possible time it comes.

    Example: qwen35 bench ./Qwen3.5-27B-FP8 --batch 1,8 --plot roofline.png
    """
    from qwen35_convert import api, report

    sweep = api.Sweep(
        _numbers("prefill", prefill), _numbers("batch", batch), context, device, peer=peer
    )
    found = api.bench(artifact, sweep, progress=True)
    if plot is not None:
        from qwen35_convert.benchmarking.roofline import draw_roofline

        draw_roofline(found, plot)
    if json:
        report.print_json(found.as_dict())
    else:
        report.print_bench(found)


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Return the numbers of `1,8,64`; none for an empty text."""
    from qwen35_convert.errors import RecipeError

    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise RecipeError(f"--{name} is {text!r}, expected numbers such as 1,8,64")
    return tuple(int(word) for word in words)


def _limit(size: str | None) -> Limit:
    """Return the limit that `600MB` sets; without one, that of the command."""
    from qwen35_convert.errors import RecipeError
    from qwen35_convert.recipe import parse_size
    from qwen35_convert.run.memory import Limit

    try:
        return Limit(DEFAULT_MEMORY, firm=False) if size is None else Limit(parse_size(size))
    except ValueError as error:
        raise RecipeError(f"--memory-limit: {error}") from None


@app.command()
def run(
    artifact: Source,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")],
    chat: Annotated[bool, typer.Option("--chat", help="Put it into the chat template.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Stop after so many.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16.", show_default="float32; on a GPU bfloat16"),
    ] = None,
    speculate: Annotated[bool, typer.Option("--speculate", help="Draft by the MTP head.")] = False,
) -> None:
    """Generate text with an artifact; the text streams on stdout, nothing else does.

    Example: qwen35 run ./Qwen3.5-27B-FP8 --chat --prompt "Why is the sky blue?"
    """
    from qwen35_convert import api

    asked = api.Prompt(prompt, chat, max_tokens, temperature, seed, speculate, dtype)
    for piece in api.run_text(artifact, asked):
        print(piece, end="", flush=True)
    print()


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe.")] = None,
) -> None:
    """List the bundled recipes, or print one.

    Example: qwen35 recipes fp8-block
    """
    from qwen35_convert.recipe import bundled_recipes, find_recipe, headline

    if name:
        print(find_recipe(name).read_text(encoding="utf-8"), end="")
        return
    for bundled in bundled_recipes():
        print(f"{bundled:<16} {headline(bundled)}")


def main() -> None:
    """Run the command line; errors are one block on stderr, a traceback is a bug."""
    try:
        from qwen35_convert.run.bus_error import exit_on_bus_error

        exit_on_bus_error(INPUT)
        app(prog_name="qwen35")
    except KeyboardInterrupt:  # before or after the command itself
        print(STOPPED, file=sys.stderr)
        sys.exit(INTERRUPTED)
    except SystemExit as done:
        if done.code == INTERRUPTED:
            print(STOPPED, file=sys.stderr)
        raise
    except Qwen35Error as error:
        text = str(error)
        text = text if len(text) <= MAX_MESSAGE else f"{text[:MAX_MESSAGE]} ..."
        print(f"qwen35: {text}\n  left  {error.left}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
