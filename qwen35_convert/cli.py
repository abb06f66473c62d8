"""The `qwen35` command. A command parses, makes one call of `qwen35_convert.api`, prints.

Results go to stdout, progress and warnings to stderr. Exit codes: 0 done, 1 verification fell
short, 2 misused, 3 input refused, 4 output refused, 5 this machine lacks something, 130
interrupted. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from formats.errors import FELL_SHORT, INPUT, INTERRUPTED, LACKING, MISUSED, Qwen35Error
from qwen35_convert import completion
from qwen35_convert.cli_options import (
    DEFAULT_RECIPES,
    Base,
    Device,
    Json,
    Junit,
    Memory,
    Metadata,
    NoVerify,
    Out,
    OutputFormat,
    Overwrite,
    PlanOnly,
    Quiet,
    Set,
    Source,
    Stream,
    Template,
    Workers,
    parse_limit,
    parse_numbers,
)
from qwen35_convert.errors import Interrupted
from qwen35_convert.misuse import show_misuse
from qwen35_convert.options import DEFAULTS as RUN
from qwen35_convert.options import RunOptions
from qwen35_convert.output import GITHUB, JSON, Output
from qwen35_convert.streams import outlive_readers

if TYPE_CHECKING:
    from qwen35_convert.planning.plan import Plan
    from qwen35_convert.recipe import Recipe
    from qwen35_convert.source import Source as SourceOf

app = typer.Typer(
    name="qwen35",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

COLLECTED_FROM = 200_000  # new objects; at Python's 700, collections are a tenth of `import torch`


def _print_version(wanted: bool) -> None:
    if wanted:
        from qwen35_convert.versions import version_line

        print(version_line())
        raise typer.Exit


@app.callback()
def qwen35(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, and those of torch, triton and numba.",
        ),
    ] = False,
) -> None:
    """Convert, quantise and verify Qwen3.5-family checkpoints."""


@app.command()
def inspect(
    source: Source,
    json: Json = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
) -> None:
    """Show what a checkpoint holds: sizes, layout, problems, how to serve it.

    Example: qwen35 inspect Qwen/Qwen3.5-0.8B
    """
    from qwen35_convert import api, report

    inspection = api.inspect(source)
    if json:
        report.print_json(inspection.as_dict(tensors=tensors))
    else:
        report.print_inspection(inspection, tensors=tensors)


@app.command()
def download(
    repo: Annotated[str, typer.Argument(help="owner/name on the hub.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write.", show_default=False)],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit.")] = None,
    quiet: Quiet = False,
) -> None:
    """Download the files a conversion needs, checked by size and hash.

    Example: qwen35 download Qwen/Qwen3.5-0.8B -o Qwen3.5-0.8B
    """
    from qwen35_convert import api

    fetched = api.download(repo, out, revision=revision, progress=not quiet)
    print(f"{fetched.path}: {len(fetched.files)} files of {fetched.repo}@{fetched.revision}")


@app.command()
def convert(
    source: Source,
    out: Out,
    recipe: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Recipe to follow.",
            show_default=DEFAULT_RECIPES,
            autocompletion=completion.recipe_names,
        ),
    ] = None,
    base: Base = None,
    chat_template: Template = None,
    metadata: Metadata = None,
    set_: Set = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="GLOB", help="Convert only matching tensors, e.g. 'layers.0.*'."),
    ] = None,
    plan: PlanOnly = False,
    workers: Workers = None,
    memory_limit: Memory = None,
    device: Device = RUN.device,
    stream: Stream = False,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    executor: Annotated[
        str,
        typer.Option(
            help="threads, or ray: the nodes of the cluster at RAY_ADDRESS, or of a local one. "
            "--workers and --memory-limit then apply to each node.",
            autocompletion=completion.executors,
        ),
    ] = RUN.executor,
    json: Json = False,
    output_format: OutputFormat = None,
    junit: Junit = None,
    quiet: Quiet = False,
) -> None:
    """Convert a checkpoint by a recipe, then verify the result against its source.

    Example: qwen35 convert Qwen/Qwen3.5-27B -o Qwen3.5-27B-FP8 --recipe fp8-block
    """
    from qwen35_convert.card.metadata_file import metadata_override, template_override
    from qwen35_convert.recipe import quoted

    output = Output.of("convert", output_format, junit, json=json)
    overrides = (
        *(set_ or ()),
        *([f"only={quoted(only)}"] if only else ()),
        *([template_override(chat_template)] if chat_template else ()),
        *([metadata_override(metadata)] if metadata else ()),
    )
    options = RunOptions(
        workers=workers,
        memory_limit=parse_limit(memory_limit),
        device=device,
        executor=executor,
        stream=stream,
        overwrite=overwrite,
        verify=not no_verify,
        progress=not quiet,
    )
    merged = _merged(source, base)
    _convert(merged, out, recipe, options, output, overrides=overrides, plan=plan)


@app.command()
def quantize(
    source: Source,
    out: Out,
    scheme: Annotated[
        str,
        typer.Option(
            help="fp8-block, fp8-channel, nvfp4a16, mxfp4a16, int4 or int8.",
            autocompletion=completion.scheme_names,
        ),
    ],
    set_: Set = None,
    plan: PlanOnly = False,
    workers: Workers = None,
    memory_limit: Memory = None,
    device: Device = RUN.device,
    stream: Stream = False,
    overwrite: Overwrite = False,
    no_verify: NoVerify = False,
    json: Json = False,
    output_format: OutputFormat = None,
    junit: Junit = None,
    quiet: Quiet = False,
) -> None:
    """Quantise a checkpoint; names and layout stay as they are.

    Example: qwen35 quantize ./Qwen3.5-9B -o ./Qwen3.5-9B-FP8 --scheme fp8-block
    """
    from qwen35_convert.api import quantize_recipe

    output = Output.of("quantize", output_format, junit, json=json)
    recipe = quantize_recipe(scheme, tuple(set_ or ()))
    options = RunOptions(
        workers=workers,
        memory_limit=parse_limit(memory_limit),
        device=device,
        stream=stream,
        overwrite=overwrite,
        verify=not no_verify,
        progress=not quiet,
    )
    _convert(source, out, recipe, options, output, plan=plan)


def _merged(source: str, base: str | None) -> SourceOf:
    """Return what is to be opened: a model, or an adapter and its model."""
    from qwen35_convert.source import Merge

    return source if base is None else Merge(source, base)


def _convert(
    source: SourceOf,
    out: Path,
    recipe: str | Recipe | None,
    options: RunOptions,
    output: Output,
    *,
    overrides: tuple[str, ...] = (),
    plan: bool,
) -> None:
    from qwen35_convert import api, report

    if plan:
        planned = api.plan(source, recipe, out, overrides=overrides, stream=options.stream)
        _print_plan(planned, json=output.form == JSON)
        return
    if options.progress and output.form != GITHUB:
        options = replace(options, on_plan=report.print_notes)
    done = api.convert(source, out, recipe, options, overrides=overrides)
    output.conversion(done)
    if done.failed:
        print(f"qwen35: {out} was not written: {done.out} failed its verification", file=sys.stderr)
        raise typer.Exit(FELL_SHORT)


def _print_plan(plan: Plan, *, json: bool) -> None:
    from qwen35_convert import report

    if json:
        report.print_json(report.plan_as_dict(plan))
    else:
        print(report.plan_text(plan))


@app.command()
def verify(
    artifact: Annotated[
        str | None, typer.Argument(help="Folder or file to verify.", show_default=False)
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Source it was made from.")
    ] = None,
    base: Base = None,
    level: Annotated[
        str,
        typer.Option(help="structure, tensors or logits.", autocompletion=completion.levels),
    ] = "tensors",
    text: Annotated[
        str, typer.Option(metavar="FILE", help="Text for level logits.", show_default="bundled")
    ] = "default",
    max_kl: Annotated[
        float | None, typer.Option(help="Maximum mean KL divergence, in nats per token.")
    ] = None,
    min_top1: Annotated[float | None, typer.Option(help="Minimum top-1 agreement, 0 to 1.")] = None,
    logits_cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep what the source's layers compute."),
    ] = None,
    by_bounds: Annotated[
        bool,
        typer.Option("--by-bounds", help="Judge calibrated weights; run no calibration again."),
    ] = False,
    workers: Workers = None,
    memory_limit: Memory = None,
    list_checks: Annotated[
        bool, typer.Option("--list-checks", help="List what is checked at which level, and stop.")
    ] = False,
    json: Json = False,
    output_format: OutputFormat = None,
    junit: Junit = None,
    quiet: Quiet = False,
) -> None:
    """Verify an artifact: its structure, every value, and its predictions.

    Example: qwen35 verify ./Qwen3.5-27B-FP8 --against Qwen/Qwen3.5-27B
    """
    from qwen35_convert import api, report
    from qwen35_convert.errors import RecipeError

    output = Output.of("verify", output_format, junit, json=json)
    if list_checks:
        report.print_checks(json=output.form == JSON)
        return
    if artifact is None:
        raise RecipeError("ARTIFACT is missing", expected="a folder or file to verify")
    if base is not None and against is None:
        raise RecipeError("--base", "names a model alone", "--against ADAPTER --base SOURCE")
    limit = parse_limit(memory_limit)
    result = api.verify(
        artifact,
        against and _merged(against, base),
        level=level,
        logits=api.LogitsCheck(text, max_kl, min_top1, cache=logits_cache),
        options=RunOptions(workers=workers, memory_limit=limit, progress=not quiet),
        by_bounds=by_bounds,
    )
    output.verification(result, artifact)
    if not result.passed:
        raise typer.Exit(FELL_SHORT)


@app.command()
def imatrix(
    source: Source,
    out: Annotated[Path, typer.Option("-o", "--out", help="File to write.", show_default=False)],
    text: Annotated[
        str, typer.Option(metavar="FILE", help="Calibration text.", show_default="bundled")
    ] = "default",
    chunks: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of 512-token chunks.", show_default="all"),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compute an importance matrix, for the key quantize.imatrix of a GGUF recipe.

    Example: qwen35 imatrix Qwen/Qwen3.5-35B-A3B --text calibration.txt -o imatrix.gguf
    """
    from qwen35_convert import api, report

    matrix = api.imatrix(
        source, out, text=text, chunks=chunks, overwrite=overwrite, progress=not quiet
    )
    if json:
        report.print_json(matrix.as_dict())
    else:
        report.print_imatrix(matrix, notes=not quiet)


@app.command()
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
    """Time an artifact on this machine and compare it with the hardware limit.

    Example: qwen35 bench ./Qwen3.5-27B-FP8 --batch 1,8 --plot roofline.png
    """
    from qwen35_convert import api, report

    sweep = api.Sweep(
        parse_numbers("prefill", prefill), parse_numbers("batch", batch), context, device, peer=peer
    )
    measured = api.bench(artifact, sweep, progress=not quiet)
    if plot is not None:
        from qwen35_convert.benchmarking.roofline import draw_roofline

        draw_roofline(measured, plot)
    if json:
        report.print_json(measured.as_dict())
    else:
        report.print_bench(measured)


@app.command()
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
        bool, typer.Option("--speculate", help="Draft tokens with the MTP head.")
    ] = False,
) -> None:
    """Generate text from an artifact; only the text goes to stdout.

    Example: qwen35 run ./Qwen3.5-27B-FP8 --chat --prompt "Why is the sky blue?"
    """
    from qwen35_convert import api

    request = api.Prompt(prompt, chat, max_tokens, temperature, seed, speculate, dtype)
    for piece in api.run_text(artifact, request):
        print(piece, end="", flush=True)
    print()


@app.command()
def upload(
    artifact: Annotated[str, typer.Argument(help="Folder or .gguf file, with its receipt.")],
    repo: Annotated[str, typer.Argument(help="owner/name on the hub; made if there is none.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would be there; use no network.")
    ] = False,
    private: Annotated[
        bool, typer.Option("--private", help="Make the repository a private one.")
    ] = False,
    json: Json = False,
) -> None:
    """Publish a model on the hub: the files its receipt lists, the receipt and a card.

    Example: qwen35 upload ./Qwen3.5-9B-FP8 me/Qwen3.5-9B-FP8 --dry-run
    """
    from qwen35_convert import api, report

    uploaded = api.upload(artifact, repo, private=private, dry_run=dry_run)
    if json:
        report.print_json(uploaded.as_dict())
    else:
        report.print_upload(uploaded)


@app.command()
def recipes(
    name: Annotated[
        str | None,
        typer.Argument(help="Recipe to print.", autocompletion=completion.recipe_names),
    ] = None,
    check: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="List every mistake of a recipe; exit 2 if it has any."),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of recipes, for editors.")
    ] = False,
    json: Json = False,
    output_format: OutputFormat = None,
    junit: Junit = None,
) -> None:
    """List the bundled recipes, print one, or check a recipe of your own.

    Example: qwen35 recipes --check ours.yaml
    """
    from qwen35_convert import recipe_report

    output = Output.of("recipes", output_format, junit, json=json)
    if check is not None:
        from qwen35_convert.recipe_check import check_recipe

        mistakes = check_recipe(check)
        output.mistakes(check, mistakes)
        if mistakes:
            raise typer.Exit(MISUSED)
    elif schema:
        recipe_report.print_schema()
    elif name:
        recipe_report.print_recipe(name, json=output.form == JSON)
    else:
        recipe_report.print_recipes(json=output.form == JSON)


def main() -> None:
    """Run the command line; errors are one block on stderr, a traceback is a bug."""
    if sys.platform == "win32":
        print("qwen35: Windows is not supported; use WSL, which is Linux", file=sys.stderr)
        sys.exit(LACKING)
    gc.set_threshold(COLLECTED_FROM)
    outlive_readers()
    words = sys.argv[1:]
    try:
        from qwen35_convert.run.bus_error import exit_on_bus_error

        exit_on_bus_error(INPUT)
        code = run_words(words)
    except KeyboardInterrupt:  # before or after the command itself
        code = Output.of_words(words).error(Interrupted())
    sys.exit(code)


def run_words(words: Sequence[str]) -> int:
    """Run a command line; return its exit code."""
    output = Output.of_words(words)
    try:
        code = app(list(words), prog_name="qwen35", standalone_mode=False) or 0
    except typer.TyperException as error:
        return output.misuse(show_misuse(error), error.exit_code)
    except Qwen35Error as error:
        return output.error(error)
    if code == INTERRUPTED:
        return output.error(Interrupted())
    return int(code)


if __name__ == "__main__":
    main()
