"""One conversion: every refusal that needs no weight, then the work.

OUT -> source, recipe -> plan -> `execution`, which is loaded when there is a plan
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from qwen35_convert.calibration.means import check_means
from qwen35_convert.containers.registry import check_out
from qwen35_convert.options import RunOptions
from qwen35_convert.planned import plan_conversion
from qwen35_convert.recipe.recipe import Recipe

if TYPE_CHECKING:
    from qwen35_convert.artifact import Conversion
    from qwen35_convert.write.receipt import Origin


def convert_checkpoint(
    source: Checkpoint, origin: Origin, path: Path, out: Path, recipe: Recipe, options: RunOptions
) -> Conversion:
    """Convert an opened checkpoint into `out`; refuse what can be refused before a byte is read.

    path  what the source was opened from
    """
    check_out(out, source, overwrite=options.overwrite)
    check_means(source, recipe, options)
    planned = plan_conversion(source, recipe, out)
    from qwen35_convert.execution import execute

    return execute(planned, source, origin, path, out, options)
