"""The memory that calibration takes, held against a limit before a byte is written.

    residual streams + experts at work + one layer in float32 + activations of the mixers at work
    + an input's sums and their factor + rows that are encoded at once
    + mapped pages of source and artifact

The factor is made in float64: with its steps it takes ten times the sums. On a CPU experts are read
one by one, so a layer counts without them, but for those at work. Each of these holds its tokens'
inputs and outputs; it is taken to get no more than four times the mean of all experts. A mixer
holds what its widest projection gives for a group of tokens, and five tensors of its kind. Where a
text gives scales alone, there are neither sums nor rows.

On a GPU whole matrices are encoded, of experts as many together as take this much, whatever there
is: the same matrices together, the same bytes.

    matrices at once * (two copies of sums and factor + 48 bytes of each weight) <= BATCH_BYTES

Its memory holds the layer whole, with its experts.
"""

from __future__ import annotations

from collections import Counter
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING

from formats.checkpoint import MAX_MAPPED, Checkpoint
from formats.family.roles import EXPERT
from qwen35_convert.errors import RecipeError
from qwen35_convert.options import Limit
from qwen35_convert.planning.calibrated import ENDS, adds_to_stream, stage_of, stages
from qwen35_convert.planning.plan import Item, Plan
from qwen35_convert.recipe.parts import GPTQ, NEAREST
from qwen35_convert.run.memory import MARGIN, resident
from qwen35_convert.sizes import mb_text

if TYPE_CHECKING:
    from formats.family.config import Config

# Streams held at once: of a mixture also its norm and what the shared expert gives, twice.
STREAMS, OF_MIXTURE = 4, 8
SUMS, FACTOR = 4, 40  # bytes of an element of a matrix of K by K
BUSIEST = 4  # an expert's tokens, over the mean
GROUP, LIKE_IT = 512, 6  # tokens of a mixer's group; tensors as wide as its widest projection
TRIED = 256  # rows and columns on which the encoders are tried
# Rows are encoded in ranges of this memory, whatever there is: the same ranges, the same bytes.
# Candidates for steps take a third of it besides.
CHUNK_BYTES = 64 << 20
CANDIDATES = CHUNK_BYTES // 3
BATCH_BYTES = 4 << 30
# Of sums and factor, twice; of a weight: itself, its units, both in the factor's order, slopes; or
# itself, its units, slopes, what it should be, candidates for steps and what they leave.
IN_A_BATCH, WEIGHT = 16, 48
# Of a weight whose rows are encoded in one go: itself twice, its units, its parts, candidates.
WHOLE = 28


def matrices_at_once(rows: int, columns: int) -> int:
    """Return how many experts' matrices of this shape a GPU encodes together."""
    return max(1, BATCH_BYTES // batch_bytes(rows, columns))


def batch_bytes(rows: int, columns: int) -> int:
    """Return what a matrix of this shape takes while a GPU encodes it."""
    return IN_A_BATCH * columns**2 + WEIGHT * rows * columns


def calibration_bytes(plan: Plan, source: Checkpoint, tokens: int, workers: int) -> int:
    """Return what calibration holds beside the program and the plan."""
    layers: Counter[str] = Counter()
    rows: Counter[str] = Counter()  # of what is one matrix when it is run
    experts = [0]
    for name, atom in source.layout.atoms.items():
        stage, nbytes = stage_of(name), 4 * prod(atom.shape)
        if atom.role == EXPERT:
            experts.append(3 * nbytes)
        elif stage is not None and stage not in ENDS:
            layers[stage] += nbytes
            rows[atom.matrix] += atom.shape[0]
    at_work = max(experts) + 4 * LIKE_IT * min(tokens, GROUP) * max(rows.values(), default=0)
    layer = max(layers.values(), default=0) + workers * at_work
    streams = 4 * tokens * _floats_of_a_token(source.config, workers)
    return streams + layer + _encoding_bytes(plan, workers) + 2 * MAX_MAPPED + MARGIN


def _floats_of_a_token(config: Config, workers: int) -> int:
    """Return what is held of each token: streams, and of experts at work inputs and outputs."""
    sizes = config.sizes
    if not config.moe:
        return STREAMS * sizes["H"]
    share = min(1.0, BUSIEST * sizes["TOPK"] / sizes["E"])
    return OF_MIXTURE * sizes["H"] + int(workers * share * (3 * sizes["H"] + 5 * sizes["F"]))


def _encoding_bytes(plan: Plan, workers: int) -> int:
    """Return what sums, their factor and ranges of rows take; 0 if a text gives scales alone."""
    shapes = [item.atom.shape for item in _calibrated(plan)]
    if not shapes:
        return 0
    squares = max(shape[-1] for shape in shapes) ** (2 if _method(plan) == GPTQ else 1)
    rows = workers * min(CHUNK_BYTES + CANDIDATES, WEIGHT * max(map(prod, shapes)))
    return squares * (2 * SUMS + FACTOR) + max(rows, _whole_bytes(plan))


def _whole_bytes(plan: Plan) -> int:
    """Return what the largest weight takes whose rows are encoded in one go, one after another."""
    if _method(plan) != GPTQ:
        return 0
    atoms = [item.atom for item in _calibrated(plan) if adds_to_stream(item.atom.name)]
    return max((WHOLE * prod(atom.shape) + SUMS * atom.shape[-2] ** 2 for atom in atoms), default=0)


def _calibrated(plan: Plan) -> list[Item]:
    return [plan.items[index] for items in stages(plan).values() for index in items]


def _method(plan: Plan) -> str:
    return plan.recipe.quantize.method


def memory_note(plan: Plan, source: Checkpoint, tokens: int) -> str:
    """Say what calibration takes on a CPU, for a plan."""
    one, two = (calibration_bytes(plan, source, tokens, workers) for workers in (1, 2))
    return (
        f"calibration reads {tokens} tokens and takes {mb_text(one)} beside the program, and "
        f"{mb_text(two - one)} for each worker beyond the first"
    )


def device_bytes(plan: Plan, source: Checkpoint, tokens: int) -> int:
    """Return what calibration holds of a GPU's memory: an estimate, from above."""
    layers: dict[str, int] = {}
    for name, atom in source.layout.atoms.items():
        stage = stage_of(name)
        if stage is not None and stage not in ENDS:
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
    _warm(plan)
    needed = resident() + calibration_bytes(plan, source, tokens, workers)
    method = _method(plan)
    known = "the text" if method == NEAREST else "the sums of its inputs"
    if needed > limit.nbytes:
        raise RecipeError(
            "--memory-limit",
            f"is {mb_text(limit.nbytes)}",
            f"{mb_text(needed)} or more, as one layer and {known} need",
            "fewer quantize.calibrate.tokens, fewer --workers"
            + (", or quantize.method=sweep" if method == GPTQ else ""),
        )


def _warm(plan: Plan) -> None:
    """Load and compile what calibration runs, so that it is measured."""
    import torch

    from quant.fourbit.hessian import factor

    for name in ("runtime.hessian", "runtime.layerwise"):
        import_module(name)
    w, one = torch.eye(TRIED, dtype=torch.bfloat16), factor(torch.eye(TRIED))
    for scheme in {item.scheme for item in _calibrated(plan)}:
        scheme.encode(w, scheme.prepare(iter([w])), factor=one)
