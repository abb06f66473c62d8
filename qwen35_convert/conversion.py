"""One conversion, checked before a weight is read: plan, output, verification, memory.

source, recipe -> plan -> OUT is free -> verification is possible -> memory -> executor -> artifact
"""

from __future__ import annotations

from pathlib import Path

from formats.checkpoint import Checkpoint
from qwen35_convert.artifact import Conversion, Job, digest_of, write_artifact
from qwen35_convert.errors import RecipeError
from qwen35_convert.planning.make import make_plan
from qwen35_convert.planning.plan import Plan
from qwen35_convert.recipe import Recipe
from qwen35_convert.run.executor import open_executor
from qwen35_convert.run.memory import fit_memory
from qwen35_convert.run.options import RunOptions
from qwen35_convert.verification.logits import token_rows
from qwen35_convert.verification.verify import check_verifiable
from qwen35_convert.write.file_sink import check_out_files, finish_moves, is_gguf
from qwen35_convert.write.receipt import Origin, receipt_name
from qwen35_convert.write.sink import check_out


def convert_checkpoint(
    source: Checkpoint, origin: Origin, path: Path, out: Path, recipe: Recipe, options: RunOptions
) -> Conversion:
    """Convert an opened checkpoint into `out`; refuse what can be refused before a byte is read.

    path  what the source was opened from
    """
    _check_folder(source, out, options)
    plan = plan_for(source, recipe, out)
    finished = _finished_before(plan, source, out, options)
    if finished is not None:
        return finished
    if options.verify:
        check_verifiable(plan)
        if recipe.verify.level == "logits":
            token_rows(source, recipe.verify.text)  # refused now, not after the work
    options.on_plan(plan)
    threads = options.threads(streamed=source.remote is not None)
    share = fit_memory(plan, source, options.memory_limit, threads, verify=options.verify)
    with open_executor(options, path) as execute:
        return write_artifact(Job(plan, source, origin, out, options, share, execute))


def plan_for(source: Checkpoint, recipe: Recipe, out: Path) -> Plan:
    """Return the plan. RecipeError if OUT does not fit the format that the recipe asks for."""
    if (recipe.export.format == "gguf") != is_gguf(out):
        raise RecipeError(
            f"recipe {recipe.name}",
            f"writes {recipe.export.format}, but OUT is {out.name}",
            "a name that ends in .gguf" if recipe.export.format == "gguf" else "a folder",
        )
    return make_plan(source, recipe, out.stem)


def _check_folder(source: Checkpoint, out: Path, options: RunOptions) -> None:
    if not is_gguf(out):
        origin = source.read_files()[0] if source.gguf else source.folder
        check_out(out, origin, overwrite=options.overwrite)


def _finished_before(
    plan: Plan, source: Checkpoint, out: Path, options: RunOptions
) -> Conversion | None:
    """Return the conversion to a GGUF file that an earlier run finished all but its names."""
    if not is_gguf(out):
        return None
    names = [shard.name for shard in plan.shards]
    if finish_moves(out, out.with_name(names[0]), digest_of(plan, source)):
        receipt = out.with_name(receipt_name(out)).read_bytes()
        return Conversion(out, plan, receipt, None)
    check_out_files(out, names, source.read_files(), overwrite=options.overwrite)
    return None
