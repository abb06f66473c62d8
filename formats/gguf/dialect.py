"""GGUF's way to spell the family: other names, tiled heads, shifted norms (see `names`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from formats.family.config import Config
from formats.family.dialects import Words
from formats.family.moves import Squeeze, Unsqueeze
from formats.family.names import rename
from formats.family.ops import Op, Shape
from formats.family.slots import Slot
from formats.gguf.names import FUSED_EXPERTS, hub_name, ops_from_gguf, spell
from formats.stored import Problem
from formats.tensor import TensorInfo

GGUF = "gguf"
AGAIN = "make the file again from the checkpoint that it was made from"
WORDS = Words(missing=AGAIN, strange=AGAIN, shape=AGAIN)
# Axes of length 1 that GGUF drops: always of conv1d, of the shared expert's gate by some writers.
SQUEEZED = {"conv1d": 1}
SOMETIMES_FLAT = {"shared_expert_gate": 0}


@dataclass(frozen=True, slots=True)
class GgufDialect:
    """GGUF's way."""

    kind: str = GGUF
    words: Words = WORDS

    def rename(
        self, infos: Mapping[str, TensorInfo], config: Config
    ) -> tuple[dict[str, str], list[Problem]]:
        """Map each name of the table to its name in the file."""
        fused = any(name.endswith("." + FUSED_EXPERTS) for name in infos)
        stored = {name: hub_name(name, len(config.layer_types), fused=fused) for name in infos}
        renamed, problems = rename(stored.values())
        by_hub = {hub: name for name, hub in stored.items()}
        return {hub: by_hub[name] for hub, name in renamed.items()}, problems

    def spelling(self, _names: Mapping[str, str], config: Config) -> Callable[[str], str]:
        """Return the table's other column."""
        return partial(spell, num_layers=len(config.layer_types))

    def stored_shape(self, slot: Slot, shape: Shape) -> Shape:
        """Return the table's shape without the axes that are dropped."""
        role = slot.rule.role
        if role in SQUEEZED:
            return Squeeze(SQUEEZED[role]).shape(slot.shape)
        if role in SOMETIMES_FLAT and len(shape) < len(slot.shape):
            return Squeeze(SOMETIMES_FLAT[role]).shape(slot.shape)
        return slot.shape

    def ops_to_hub(
        self, role: str, slot: Slot, shape: Shape, sizes: Mapping[str, int]
    ) -> tuple[Op, ...]:
        """Return what undoes the file's transforms."""
        if role in SOMETIMES_FLAT and len(shape) < len(slot.shape):
            return (Unsqueeze(SOMETIMES_FLAT[role]),)
        return ops_from_gguf(role, sizes)
