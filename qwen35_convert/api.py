"""The functions of the Python API: what the commands do, with typed arguments and results.

Those that make and prove an artifact are here, those that measure in measuring.

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

from qwen35_convert.containers.registry import (
    check_out,
    container_for,
    default_recipe,
    open_checkpoint,
)
from qwen35_convert.errors import RecipeError
from qwen35_convert.options import DEFAULTS, RunOptions, check_device
from qwen35_convert.recipe.choice import named_recipe, quantize_recipe
from qwen35_convert.source import Source, open_headers, open_source, path_here, path_of

if TYPE_CHECKING:
    from qwen35_convert.artifact import Conversion
    from qwen35_convert.hub.fetch import Fetched
    from qwen35_convert.planning.plan import Plan
    from qwen35_convert.publish import Uploaded
    from qwen35_convert.recipe.recipe import Recipe
    from qwen35_convert.text.generation import Prompt
    from qwen35_convert.verification.logits import LogitsCheck
    from qwen35_convert.verification.verify import Report

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
    if out != UNNAMED:
        check_out(out, opened, overwrite=True)
    planned = plan_conversion(opened, chosen, out).plan
    if out != UNNAMED:
        container_for(out).check_files(out, planned, opened, overwrite=True)
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
    path = path_of(source, opened, origin)
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
    from qwen35_convert.verification.levels import (
        check_measurable,
        effective_level,
        need_logits,
        need_source,
    )
    from qwen35_convert.verification.logits import DEFAULT_LIMITS

    check = logits or DEFAULT_LIMITS
    effective = effective_level(level, check)
    need_logits(effective, check)
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
