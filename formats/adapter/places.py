"""Where a tensor of the family lies in a base model, whichever way that stores its experts.

An adapter may have been trained on fused experts and be merged into split ones, or the other way
round. A place is a run of rows of one stored tensor, and the cut that takes what belongs there out
of the adapter's tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.family.layout import Atom
from formats.family.moves import VIEWS
from formats.family.names import normalise
from formats.family.ops import Op, apply_all
from formats.family.pieces import EXPERT_PIECES, pieces_of
from formats.family.rules import RULES, template
from formats.family.slots import Slot, shape_of

if TYPE_CHECKING:
    from formats.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Place:
    """Rows from `start` of the tensor that stores `atom`, which `cut` takes out of a slot's."""

    atom: Atom
    start: int
    cut: tuple[Op, ...] = ()


class Places:
    """The places of a base model."""

    def __init__(self, base: Checkpoint) -> None:
        self._sizes, self._atoms = base.config.sizes, base.layout.atoms
        self._infos = base.infos()
        self._stored = {normalise(atom.weight): atom for atom in self._atoms.values()}

    def slot(self, hub: str) -> Slot | None:
        """Return the tensor of the family of this name, None if a model of these sizes has none."""
        key, indices = template(hub)
        rule = RULES.get(key)
        if rule is None:
            return None
        try:
            return Slot(rule, hub, indices, shape_of(rule, self._sizes))
        except KeyError:  # a vision tower in a model without one, experts in a dense one
            return None

    def of(self, slot: Slot) -> list[Place]:
        """Return the places of a tensor of the family; none if the base model does not have it."""
        if slot.hub in self._stored:
            return [Place(self._stored[slot.hub], 0)]
        if slot.name in self._atoms:
            return list(self._cut_out(self._atoms[slot.name], ()))
        if slot.rule.role not in EXPERT_PIECES:
            return []
        pieces = [
            (self._atoms.get(hub.removesuffix(".weight")), cut)
            for hub, _, cut in pieces_of(slot, self._sizes)
        ]
        return [
            place for atom, cut in pieces if atom is not None for place in self._cut_out(atom, cut)
        ]

    def _cut_out(self, atom: Atom, cut: tuple[Op, ...]) -> Iterator[Place]:
        """Yield the rows of a stored tensor that an atom is, if they follow each other."""
        import torch

        if all(isinstance(op, VIEWS) for op in atom.ops):
            lead = torch.empty(self._infos[atom.stored].shape[:-1], device="meta")
            yield Place(atom, int(apply_all(atom.ops, lead).storage_offset()), cut)
