"""A planned conversion, carried out: OUT is free -> memory fits -> an executor -> the artifact."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from formats.checkpoint import Checkpoint
from qwen35_convert.artifact import Conversion, Job, checks_of, digest_of, write_artifact
from qwen35_convert.calibration.executor import CalibratedExecutor
from qwen35_convert.calibration.means import check_inputs
from qwen35_convert.calibration.memory import check_memory
from qwen35_convert.calibration.scales import needs_inputs, needs_scales, with_scales
from qwen35_convert.calibration.texts import Texts
from qwen35_convert.containers.registry import container_for
from qwen35_convert.options import RunOptions
from qwen35_convert.planned import Planned
from qwen35_convert.planning.plan import Plan
from qwen35_convert.progress import ignore, items_bar, notice
from qwen35_convert.recipe.recipe import Recipe
from qwen35_convert.run.executor import Executor, open_executor
from qwen35_convert.run.first_use import warm_all
from qwen35_convert.run.memory import fit_memory
from qwen35_convert.verification.levels import check_measurable
from qwen35_convert.write.failed import check_failed
from qwen35_convert.write.receipt import Origin


def execute(
    planned: Planned, source: Checkpoint, origin: Origin, path: Path, out: Path, options: RunOptions
) -> Conversion:
    """Write what is planned to `out`; refuse what can be refused before a byte is read.

    path  what the source was opened from
    """
    plan, texts, recipe = planned.plan, planned.texts, planned.plan.recipe
    container = container_for(out)
    if container.finish(out, plan, digest_of(plan, source)):
        return Conversion(out, plan, container.receipt_of(out).read_bytes(), None)
    container.check_files(out, plan, source, overwrite=options.overwrite)
    if options.verify:
        container.check_verifiable(plan)
        checks = checks_of(recipe, 1)
        check_measurable(checks.effective, checks.logits, source, only=recipe.only)
        check_failed(out, container.receipt_of(out).name, source.read_files())
    check_inputs(plan, options)
    options.on_plan(plan)
    say = notice if options.progress else ignore
    warm_all(plan.schemes().values(), verify=options.verify, say=say)
    threads = options.threads(streamed=source.remote is not None)
    share = fit_memory(plan, source, options.memory_limit, threads, verify=options.verify)
    if texts is not None:
        check_memory(plan, source, options.memory_limit, texts.tokens, share.workers)
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
    with items_bar(layers, "calibrate", "layer", shown=bar) as advance:
        return with_scales(plan, source, texts, workers, lambda _: advance())
