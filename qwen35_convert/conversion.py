"""One conversion: every refusal that needs no weight, then the work.

source, recipe -> plan -> OUT is free -> memory fits -> an executor -> the artifact
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from formats.checkpoint import Checkpoint
from qwen35_convert.artifact import Conversion, Job, checks_of, digest_of, write_artifact
from qwen35_convert.calibration.executor import CalibratedExecutor, check_means
from qwen35_convert.calibration.memory import check_memory, memory_note
from qwen35_convert.calibration.scales import needs_inputs, needs_scales, with_scales
from qwen35_convert.calibration.texts import Texts, check_text
from qwen35_convert.containers.registry import container_for, expect
from qwen35_convert.errors import RecipeError
from qwen35_convert.options import RunOptions
from qwen35_convert.planning.lost_scales import check_scales
from qwen35_convert.planning.plan import Plan
from qwen35_convert.planning.shifted_norms import check_norms
from qwen35_convert.progress import ignore, items_bar, notice, quiet
from qwen35_convert.recipe import Recipe
from qwen35_convert.run.executor import Executor, open_executor
from qwen35_convert.run.first_use import warm_all
from qwen35_convert.run.memory import fit_memory
from qwen35_convert.verification.levels import check_measurable
from qwen35_convert.write.failed import check_failed
from qwen35_convert.write.receipt import Origin


def plan_conversion(source: Checkpoint, recipe: Recipe, out: Path) -> Plan:
    """Return what a recipe makes of a source at OUT; of the weights norms and a few rows are read.

    FormatError for a source that cannot be converted, RecipeError for what the recipe may not ask.
    """
    return _planned(source, recipe, out)[0]


def _planned(source: Checkpoint, recipe: Recipe, out: Path) -> tuple[Plan, Texts | None]:
    """Return the plan, and the text that it reads."""
    plan = expect(source, recipe, out)
    check_norms(source)
    check_scales(source)
    texts = check_text(source, recipe)
    if texts is None:
        return plan, None
    note = memory_note(plan, source, texts.tokens)
    return replace(plan, notes=(*plan.notes, note)), texts


def convert_checkpoint(
    source: Checkpoint, origin: Origin, path: Path, out: Path, recipe: Recipe, options: RunOptions
) -> Conversion:
    """Convert an opened checkpoint into `out`; refuse what can be refused before a byte is read.

    path  what the source was opened from
    """
    container = container_for(out)
    container.check_out(out, source, overwrite=options.overwrite)
    check_means(source, recipe, options)
    plan, texts = _planned(source, recipe, out)
    if container.finish(out, plan, digest_of(plan, source)):
        return Conversion(out, plan, container.receipt_of(out).read_bytes(), None)
    container.check_files(out, plan, source, overwrite=options.overwrite)
    if options.verify:
        container.check_verifiable(plan)
        checks = checks_of(recipe, 1)
        check_measurable(checks.effective, checks.logits, source, only=recipe.only)
        check_failed(out, container.receipt_of(out).name, source.read_files())
    options.on_plan(plan)
    say = notice if options.progress else ignore
    warm_all(plan.schemes().values(), verify=options.verify, say=say)
    threads = options.threads(streamed=source.remote is not None)
    share = fit_memory(plan, source, options.memory_limit, threads, verify=options.verify)
    if texts is not None:
        check_memory(plan, source, options.memory_limit, texts.tokens, share.workers)
    if needs_inputs(plan) and options.executor != "threads":
        raise RecipeError("nvfp4", "reads a text first", "the executor of threads")
    with _executor(recipe, options, path, texts) as execute:
        plan = _measured(plan, source, texts, share.workers, bar=options.progress)
        return write_artifact(Job(plan, source, origin, out, options, share, execute, texts))


def _executor(
    recipe: Recipe, options: RunOptions, path: Path, texts: Texts | None
) -> AbstractContextManager[Executor]:
    if recipe.quantize.chosen_by is None:
        return open_executor(options, path)
    assert texts is not None, "a recipe whose codes a text chooses has one"
    return nullcontext(CalibratedExecutor(texts))


def _measured(
    plan: Plan, source: Checkpoint, texts: Texts | None, workers: int, *, bar: bool
) -> Plan:
    """Return the plan with the scales that its text gives, with a bar on stderr on request."""
    if texts is None or not needs_scales(plan):
        return plan
    mtp = source.layout.form.mtp_layers if needs_inputs(plan) else 0
    layers = len(source.config.layer_types) + mtp
    with items_bar(layers, "calibrate", "layer") if bar else quiet() as advance:
        return with_scales(plan, source, texts, workers, lambda _: advance())
