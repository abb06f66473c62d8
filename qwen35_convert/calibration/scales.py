"""Scales that a text gives: of inputs, for the schemes that store them, and of an FP8 cache.

A plan is made from headers alone; what a text says is added when it is carried out, and again when
an artifact is proven. One walk through the source shows both. The largest inputs are rounded up to
bfloat16: machines whose float32 sums differ in the last bits then agree, but for one in thousands,
and `reencode` lets that one pass. Engines take the inputs in four bits; here they stay what they
are, so predictions are compared as those of the weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.family.cache_scales import cache_scales
from qwen35_convert.calibration.texts import Texts
from qwen35_convert.planning.plan import Item, Plan
from qwen35_convert.progress import ignore
from qwen35_convert.recipe.parts import NO_CACHE
from qwen35_convert.run.threads import one_torch_thread

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.cache_scales import CacheAmax
    from runtime.largest_inputs import LargestInputs

MAX_NAMED = 8


def needs_inputs(plan: Plan) -> bool:
    """Whether a scheme of the plan stores a scale of inputs."""
    return bool(_items(plan))


def needs_scales(plan: Plan) -> bool:
    """Whether a text must be run through the source for what the plan stores."""
    return needs_inputs(plan) or plan.recipe.quantize.kv_cache != NO_CACHE


def with_scales(
    plan: Plan,
    source: Checkpoint,
    texts: Texts,
    workers: int,
    progress: Callable[[str], None] = ignore,
) -> Plan:
    """Return the plan with what its text says; itself if nothing in it needs a text.

    progress  called after each layer

    FormatError if the source cannot be run, QuantError if it computes what is not finite.
    """
    if not needs_scales(plan):
        return plan
    import torch

    from runtime.cache_scales import CacheAmax
    from runtime.largest_inputs import LargestInputs
    from runtime.layerwise import observe_all
    from runtime.workers import Workers

    inputs = LargestInputs() if needs_inputs(plan) else None
    caches = None if plan.recipe.quantize.kv_cache == NO_CACHE else CacheAmax()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with one_torch_thread(), Workers(device, workers if device == "cpu" else 1) as threads:
        see_cache = None if caches is None else caches.see
        observe_all(
            source, texts.ids, inputs, workers=threads, see_cache=see_cache, progress=progress
        )
    plan = plan if inputs is None else _with_inputs(plan, inputs)
    return plan if caches is None else replace(plan, computed=_computed(plan, caches))


def _with_inputs(plan: Plan, largest: LargestInputs) -> Plan:
    """Return the plan with the largest inputs; linears that are one matrix have one."""
    largest.fill()
    matrices: dict[str, float] = {}
    for item in _items(plan):
        matrix, value = item.atom.matrix, largest.values[item.atom.name]
        matrices[matrix] = max(matrices.get(matrix, 0.0), value)
    inputs = {i.atom.name: rounded_up(matrices[i.atom.matrix]) for i in _items(plan)}
    unseen = [name for name in inputs if name in largest.unseen]
    return replace(plan, inputs=inputs, notes=(*plan.notes, *_notes(unseen)))


def _computed(plan: Plan, caches: CacheAmax) -> dict[str, Tensor]:
    """Return the planned scales of caches by name."""
    scales = caches.scales()
    planned = cache_scales(plan.tensors)
    return {n: scales[where][what] for where, one in planned.items() for what, n in one.items()}


def rounded_up(value: float) -> Tensor:
    """Return the least bfloat16 that is not below a number of 0 or more, as float32 []."""
    import torch

    low = 0xFFFF
    bits = torch.tensor(value, dtype=torch.float32).view(torch.int32)
    return ((bits + low) & ~low).view(torch.float32)


def _items(plan: Plan) -> list[Item]:
    return [item for item in plan.items if item.scheme.static_inputs]


def _notes(unseen: Sequence[str]) -> Iterator[str]:
    experts = list(dict.fromkeys(name.rpartition(".")[0] for name in unseen))
    if experts:
        named = ", ".join(experts[:MAX_NAMED]) + (" ..." if experts[MAX_NAMED:] else "")
        yield (
            f"no token of the text reached {len(experts)} experts, whose inputs are scaled by the "
            f"largest of their layer: {named}"
        )
