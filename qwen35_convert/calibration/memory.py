"""The memory that calibration takes, held against a limit before a byte is written.

    the residual streams + one layer in float32 + an input's sums and their factor + ranges of rows

The factor is made in float64: with its steps it takes ten times the sums. On a CPU experts are read
one by one, so a layer counts without them, but for those at work. Where a text gives scales alone,
there are neither sums nor rows.

On a GPU whole matrices are encoded, of experts as many together as take this much, whatever there
is: the same matrices together, the same bytes.

    matrices at once * (two copies of sums and factor + 40 bytes of each weight) <= BATCH_BYTES

Its memory holds the layer whole, with its experts.
"""

from __future__ import annotations

from math import prod

from formats.checkpoint import Checkpoint
from formats.family.roles import EXPERT
from qwen35_convert.errors import RecipeError
from qwen35_convert.options import Limit
from qwen35_convert.planning.calibrated import stage_of, stages
from qwen35_convert.planning.plan import Plan
from qwen35_convert.recipe import GPTQ, NEAREST
from qwen35_convert.run.memory import resident

STREAMS, SUMS, FACTOR = 4, 4, 40  # streams held; bytes of an element of a matrix of K by K
# Rows are encoded in ranges of this memory, whatever there is: the same ranges, the same bytes.
CHUNK_BYTES = 64 << 20
BATCH_BYTES = 4 << 30
# Of sums and factor, twice; of a weight: itself, its units, both in the factor's order, slopes.
IN_A_BATCH, WEIGHT = 16, 40


def matrices_at_once(rows: int, columns: int) -> int:
    """Return how many experts' matrices of this shape a GPU encodes together."""
    return max(1, BATCH_BYTES // batch_bytes(rows, columns))


def batch_bytes(rows: int, columns: int) -> int:
    """Return what a matrix of this shape takes while a GPU encodes it."""
    return IN_A_BATCH * columns**2 + WEIGHT * rows * columns


def calibration_bytes(plan: Plan, source: Checkpoint, tokens: int, workers: int) -> int:
    """Return what calibration holds beside the program and the plan."""
    layers: dict[str, int] = {}
    experts = [0]
    for name, atom in source.layout.atoms.items():
        stage, nbytes = stage_of(name), 4 * prod(atom.shape)
        if atom.role == EXPERT:
            experts.append(3 * nbytes)
        elif stage is not None:
            layers[stage] = layers.get(stage, 0) + nbytes
    streams = STREAMS * tokens * source.config.sizes["H"] * 4
    layer = max(layers.values(), default=0) + workers * max(experts)
    encoded = [plan.items[i].atom.shape[-1] for items in stages(plan).values() for i in items]
    if not encoded:
        return streams + layer
    squares = max(encoded) ** (2 if plan.recipe.quantize.method == GPTQ else 1)
    return streams + layer + squares * (2 * SUMS + FACTOR) + workers * CHUNK_BYTES


def device_bytes(plan: Plan, source: Checkpoint, tokens: int) -> int:
    """Return what calibration holds of a GPU's memory: an estimate, from above."""
    layers: dict[str, int] = {}
    for name, atom in source.layout.atoms.items():
        stage = stage_of(name)
        if stage is not None:
            layers[stage] = layers.get(stage, 0) + 4 * prod(atom.shape)
    atoms = [plan.items[i].atom for items in stages(plan).values() for i in items]
    shapes = [(atom.shape[-2], atom.shape[-1], atom.role == EXPERT) for atom in atoms]
    gptq = plan.recipe.quantize.method == GPTQ
    squares = max(columns for _, columns, _ in shapes) ** (2 if gptq else 1)
    batch = max(BATCH_BYTES if expert else batch_bytes(n, k) for n, k, expert in shapes)
    streams = STREAMS * tokens * source.config.sizes["H"] * 4
    return streams + max(layers.values()) + squares * (2 * SUMS + FACTOR) + batch


def check_memory(
    plan: Plan, source: Checkpoint, limit: Limit | None, tokens: int, workers: int
) -> None:
    """Refuse a firm limit that calibration exceeds. RecipeError says by what."""
    if limit is None or not limit.firm:
        return
    needed = resident() + calibration_bytes(plan, source, tokens, workers)
    method = plan.recipe.quantize.method
    known = "the text" if method == NEAREST else "the sums of its inputs"
    if needed > limit.nbytes:
        raise RecipeError(
            "--memory-limit",
            f"is {limit.nbytes // 10**6} MB",
            f"{-(-needed // 10**6)} MB or more, as one layer and {known} need",
            "fewer quantize.calibrate.tokens, fewer --workers"
            + (", or quantize.method=sweep" if method == GPTQ else ""),
        )
