"""Scales of inputs for the schemes that store them: a text is run through the source before.

A plan is made from headers alone; what it must know of inputs is added when it is carried out, and
again when an artifact is proven. The largest inputs are rounded up to bfloat16: machines whose
float32 sums differ in the last bits then agree, but for one in thousands, and `reencode` lets that
one pass. Engines take the inputs in four bits; here they stay what they are, so predictions are
compared as those of the weights alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from qwen35_convert.planning.plan import Item, Plan
from qwen35_convert.text.tokens import chunked, text_ids

if TYPE_CHECKING:
    from torch import Tensor

MAX_NAMED = 8


def needs_inputs(plan: Plan) -> bool:
    """Whether a scheme of the plan stores a scale of inputs."""
    return bool(_items(plan))


def with_inputs(plan: Plan, source: Checkpoint) -> Plan:
    """Return the plan with the largest inputs of its text; itself if no scheme needs them.

    RecipeError if the text cannot be read, FormatError if the source cannot be run.
    """
    items = _items(plan)
    if not items or plan.inputs:
        return plan
    import torch

    from runtime.largest_inputs import collect_largest

    device = "cuda" if torch.cuda.is_available() else "cpu"
    largest = collect_largest(source, _texts(plan, source), device=device)
    matrices: dict[str, float] = {}
    for item in items:
        matrix, value = item.atom.matrix, largest.values[item.atom.name]
        matrices[matrix] = max(matrices.get(matrix, 0.0), value)
    inputs = {item.atom.name: rounded_up(matrices[item.atom.matrix]) for item in items}
    unseen = [name for name in inputs if name in largest.unseen]
    return replace(plan, inputs=inputs, notes=(*plan.notes, *_notes(unseen)))


def rounded_up(value: float) -> Tensor:
    """Return the least bfloat16 that is not below a number of 0 or more, as float32 []."""
    import torch

    low = 0xFFFF
    bits = torch.tensor(value, dtype=torch.float32).view(torch.int32)
    return ((bits + low) & ~low).view(torch.float32)


def _items(plan: Plan) -> list[Item]:
    return [item for item in plan.items if item.scheme.static_inputs]


def _texts(plan: Plan, source: Checkpoint) -> list[Tensor]:
    """Return the text's tokens in texts of their own."""
    calibrate = plan.recipe.quantize.calibrate
    assert calibrate is not None, "recipes with such a scheme have a text"
    return chunked(text_ids(source, calibrate.text)[: calibrate.tokens])


def _notes(unseen: Sequence[str]) -> Iterator[str]:
    experts = list(dict.fromkeys(name.rpartition(".")[0] for name in unseen))
    if experts:
        named = ", ".join(experts[:MAX_NAMED]) + (" ..." if experts[MAX_NAMED:] else "")
        yield (
            f"no token of the text reached {len(experts)} experts, whose inputs are scaled by the "
            f"largest of their layer: {named}"
        )
