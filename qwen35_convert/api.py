"""The functions of the Python API: what the commands do, with typed arguments and results.

A source is a folder, a file, or "owner/name[@revision]" on the hub; or a `Merge` of two of them, an
adapter and its model. A recipe is a bundled name, a file, or a `Recipe`. Each function raises a
kind of `Qwen35Error` for what a caller can cause: RecipeError (misused), FormatError, QuantError
and FetchError (input refused), OutputError (output refused), MissingError (the machine lacks
something). Their `exit_code` is that of the command.

What refuses a source or a recipe is all that this module and its functions load at first: an error
needs nothing that computes or compares.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_convert.comparison.folders import HERE, Folders
from qwen35_convert.containers.registry import container_for, default_recipe, open_checkpoint
from qwen35_convert.errors import RecipeError
from qwen35_convert.fit.question import USUAL, Question
from qwen35_convert.options import DEFAULTS, RunOptions, check_device
from qwen35_convert.progress import items_bar
from qwen35_convert.recipe.choice import named_recipe, quantize_recipe
from qwen35_convert.source import Merge, Source, open_headers, open_source, path_here
from qwen35_convert.text.tokens import DEFAULT

if TYPE_CHECKING:
    from formats.checkpoint import Checkpoint
    from qwen35_convert.artifact import Conversion
    from qwen35_convert.benchmarking.bench import Bench
    from qwen35_convert.benchmarking.sweep import Sweep
    from qwen35_convert.comparison.result import Comparison
    from qwen35_convert.containers.gguf.imatrix_file import ImatrixReport
    from qwen35_convert.fit.goal import Fitted, Goal
    from qwen35_convert.fit.sensitivity import Sensitivity
    from qwen35_convert.hub.fetch import Fetched
    from qwen35_convert.planning.plan import Plan
    from qwen35_convert.publish import Uploaded
    from qwen35_convert.recipe.recipe import Recipe
    from qwen35_convert.text.generation import Prompt
    from qwen35_convert.verification.logits import LogitsCheck
    from qwen35_convert.verification.verify import Report
    from qwen35_convert.write.receipt import Origin

UNNAMED = Path("model")


def plan(
    source: Source,
    recipe: str | Path | Recipe | None = None,
    out: str | Path = UNNAMED,
    *,
    overrides: Sequence[str] = (),
    stream: bool = False,
) -> Plan:
    """Return the plan of a conversion to `out`; nothing is written.

    OutputError if `out` is given and could not be written whatever is overwritten: it is a part of
    the source, say.

    From a source on the hub, only headers and the few values that planning looks at are read, by
    ranges; the cache's copy is used instead if there is one and `stream` is not set.
    """
    chosen = named_recipe(recipe, overrides)
    opened = open_headers(source, stream=stream)
    chosen = chosen or default_recipe(opened, overrides, out=out)
    from qwen35_convert.planned import plan_conversion

    out = Path(out)
    container = container_for(out)
    if out != UNNAMED:
        container.check_out(out, opened, overwrite=True)
    planned = plan_conversion(opened, chosen, out).plan
    if out != UNNAMED:
        container.check_files(out, planned, opened, overwrite=True)
    return planned


def download(
    repo: str, out: str | Path, *, revision: str | None = None, progress: bool = False
) -> Fetched:
    """Fetch the files a conversion needs into a folder, checked by size and hash."""
    from qwen35_convert.hub.client import parse_repo
    from qwen35_convert.hub.fetch import fetch

    named = parse_repo(repo)
    if named is None:
        raise RecipeError(repr(repo), "is not a repository id", "owner/name")
    return fetch(named[0], revision or named[1], to=Path(out), progress=progress)


def convert(
    source: Source,
    out: str | Path,
    recipe: str | Path | Recipe | None = None,
    options: RunOptions = DEFAULTS,
    *,
    overrides: Sequence[str] = (),
) -> Conversion:
    """Convert a checkpoint into the folder or the GGUF file `out`; verify it against its source.

    recipe     None: gguf-q8_0 for a GGUF file, fp8-block for a folder, bf16-split for a folder made
               from quantised weights
    overrides  KEY=VALUE changes to the recipe, such as "quantize.scale=float32"

    An interrupted call is resumed by the same call. Nothing appears at `out` before it is complete
    and has passed its verification; what fails it lies in `out`.failed, and the result's `failed`
    is true.
    """
    check_device(options.device, fix="--device cpu quantises without one")
    chosen = named_recipe(recipe, overrides)
    opened, origin = open_source(source, progress=options.progress, stream=options.stream)
    path = _path_of(source, opened, origin)
    chosen = chosen or default_recipe(opened, overrides, out=out)
    from qwen35_convert.conversion import convert_checkpoint

    return convert_checkpoint(opened, origin, path, Path(out), chosen, options)


def quantize(
    source: Source,
    out: str | Path,
    scheme: str,
    options: RunOptions = DEFAULTS,
    *,
    overrides: Sequence[str] = (),
) -> Conversion:
    """Quantise a checkpoint; its names and layout stay as they are."""
    return convert(source, out, quantize_recipe(scheme, overrides), options)


def verify(
    artifact: str | Path,
    against: Source | None = None,
    *,
    level: str = "tensors",
    logits: LogitsCheck | None = None,
    options: RunOptions = DEFAULTS,
    by_bounds: bool = False,
) -> Report:
    """Verify an artifact, against its source if that is named.

    level      structure (headers and config), tensors (also every byte), logits (also predictions)
    logits     text and thresholds of level logits (None: the bundled text, the default limits); a
               threshold raises the level
    options    of which workers, memory_limit and progress count
    by_bounds  judge calibrated weights by their schemes' bounds, and run no calibration again
    """
    from qwen35_convert.verification.levels import check_measurable, effective_level, need_source
    from qwen35_convert.verification.logits import DEFAULT_LIMITS

    check = logits or DEFAULT_LIMITS
    effective = effective_level(level, check)
    need_source(effective, given=against is not None)
    opened = open_checkpoint(path_here(artifact))
    source = open_source(against, progress=options.progress)[0] if against else None
    if source:
        check_measurable(effective, check, source)
    from qwen35_convert.run.memory import fit_verification
    from qwen35_convert.verification.proof import Checks
    from qwen35_convert.verification.shown import verify_shown

    workers = fit_verification(source, options.memory_limit, options.threads(streamed=False))
    checks = Checks(level, check, workers, by_bounds=by_bounds)
    return verify_shown(opened, source, checks, bar=options.progress)


def compare(
    source: Source,
    recipes: Sequence[str | Path | Recipe] = (),
    artifacts: Sequence[str | Path] = (),
    *,
    text: str = DEFAULT,
    folders: Folders = HERE,
    options: RunOptions = DEFAULTS,
) -> Comparison:
    """Measure artifacts of one source beside each other: size, KL divergence, where errors enter.

    recipes    each is converted, measured, and removed again
    artifacts  folders and files that are there
    text       the file whose tokens both sides predict; `default` is the bundled one
    folders    where to work, and what is to stay
    options    of which workers, memory_limit, device and progress count

    The source runs once. Each artifact is verified as by `verify` at level logits.
    """
    check_device(options.device, fix="--device cpu quantises without one")
    chosen = [recipe for one in recipes for recipe in [named_recipe(one, ())] if recipe]
    opened, origin = open_source(source, progress=options.progress)
    from qwen35_convert.comparison.candidates import check_candidates, named_candidates
    from qwen35_convert.comparison.measure import Measuring
    from qwen35_convert.comparison.result import Comparison
    from qwen35_convert.verification.logits import LogitsCheck

    with folders.opened() as here:
        candidates = named_candidates(chosen, [path_here(one) for one in artifacts], here.artifacts)
        check, path = LogitsCheck(text, cache=here.cache), _path_of(source, opened, origin)
        check_candidates(candidates, opened, check)
        scratch = None if folders.keep else here.artifacts
        measuring = Measuring(opened, origin, path, check, options, scratch)
        return Comparison.of(opened.name, text, list(measuring.entries(candidates)))


def _path_of(source: Source, opened: Checkpoint, origin: Origin) -> Path:
    """Return what a source was opened from."""
    model = source.base if isinstance(source, Merge) else source
    return opened.folder if origin.repo else Path(model)


def imatrix(
    source: Source,
    out: str | Path,
    *,
    text: str = DEFAULT,
    chunks: int | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> ImatrixReport:
    """Compute an importance matrix over a text and write it as llama.cpp's imatrix file."""
    opened, _ = open_source(source, progress=progress)
    from qwen35_convert.containers.gguf.imatrix_file import make_imatrix

    layers = len(opened.config.layer_types) + opened.layout.form.mtp_layers
    with items_bar(layers, "imatrix", "layer", shown=progress) as advance:
        return make_imatrix(
            opened,
            text,
            Path(out),
            chunks=chunks,
            overwrite=overwrite,
            progress=lambda _: advance(),
        )


def sensitivity(
    source: Source,
    out: str | Path,
    recipe: str | Path | Recipe = "gguf-q8_0",
    question: Question = USUAL,
    options: RunOptions = DEFAULTS,
    *,
    overrides: Sequence[str] = (),
) -> Sensitivity:
    """Predict what each form of each weight costs in KL, and write the table to `out` as JSON.

    recipe    whose layout the weights have; its rules decide weights that have no choice
    question  the text, how much of it, and the forms
    options   of which workers, overwrite and progress count
    """
    chosen, path = named_recipe(recipe, overrides), Path(out)
    assert chosen is not None, "a recipe is named"
    opened, origin = open_source(source, progress=options.progress)
    from qwen35_convert.durable import check_place, save_file
    from qwen35_convert.fit.make import check_free, make_sensitivity
    from qwen35_convert.heads import COSTS

    check_free(path, opened, overwrite=options.overwrite)
    check_place(path, COSTS.encode())
    table = make_sensitivity(opened, origin, chosen, question, path.parent, options)
    save_file(path, table.content())
    return table


def fit_recipe(
    source: Source,
    out: str | Path,
    goal: Goal,
    recipe: str | Path | Recipe | None = None,
    options: RunOptions = DEFAULTS,
    *,
    overrides: Sequence[str] = (),
) -> Fitted:
    """Return the recipe of least expected KL that keeps an artifact at `out` within a size.

    goal    memory of an engine, bytes, or bits of each weight; and by which costs to choose
    recipe  to start from: its layout and rules stay; None: as for `convert`

    RecipeError if nothing is that small, and for a table of another source's weights.
    """
    from qwen35_convert.fit.base import base_of
    from qwen35_convert.fit.by_role import ByRole
    from qwen35_convert.fit.goal import check_possible, fit_within
    from qwen35_convert.fit.identity import check_source
    from qwen35_convert.fit.make import make_sensitivity, sizes_for
    from qwen35_convert.fit.sensitivity import read_sensitivity

    chosen, path = named_recipe(recipe, overrides), Path(out)
    known = None if goal.table is None else read_sensitivity(goal.table)
    opened, origin = open_source(source, progress=options.progress)
    chosen = chosen or default_recipe(opened, overrides, out=path)
    chosen = base_of(opened, chosen, goal, path)
    sizes = sizes_for(opened, chosen, Question(forms=known.forms if known else ()))
    check_possible(opened, sizes, goal, path)
    if goal.by_role:
        return fit_within(opened, sizes, ByRole.of(opened, sizes), goal, path)
    if known is None:
        known = make_sensitivity(opened, origin, chosen, USUAL, path.parent, options)
    else:
        known.check(sizes)
        check_source(known, opened, origin, options)
    return fit_within(opened, sizes, known, goal, path)


def bench(artifact: str | Path, sweep: Sweep | None = None, *, progress: bool = False) -> Bench:
    """Time an artifact on this machine and compare it with the hardware limit."""
    opened, _ = open_source(artifact, progress=progress)
    from qwen35_convert.benchmarking.bench import run_bench
    from qwen35_convert.benchmarking.sweep import Sweep

    sweep = sweep or Sweep()
    steps = len(sweep.prefill) + len(sweep.batch)
    with items_bar(steps, "bench", "step", shown=progress) as advance:
        return run_bench(opened, sweep, lambda _: advance())


def upload(
    artifact: str | Path, repo: str, *, private: bool = False, dry_run: bool = False
) -> Uploaded:
    """Publish an artifact on the hub: the files its receipt lists, the receipt, and a card.

    private  make the repository private, if there is none yet
    dry_run  only return what would be there
    """
    from qwen35_convert.publish import upload_artifact

    workers = DEFAULTS.threads(streamed=False)
    path = path_here(artifact)
    return upload_artifact(path, repo, private=private, dry_run=dry_run, workers=workers)


def run_text(artifact: str | Path, prompt: Prompt, *, progress: bool = False) -> Iterator[str]:
    """Yield the text an artifact generates, piece by piece."""
    opened, _ = open_source(artifact, progress=progress)
    from qwen35_convert.text.generation import generate_text

    return generate_text(opened, prompt)
