"""Stored weights beside the places of the family: atoms where they fit, problems where not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from formats.family.config import Config
from formats.family.config_fields import ABSENT
from formats.family.dialects import HUB_DIALECT, MLX, Dialect
from formats.family.layout import Atom
from formats.family.lost_fields import LOST
from formats.family.names import optional_part
from formats.family.ops import Shape, shape_after
from formats.family.pieces import EXPERT_PIECES, pieces_of
from formats.family.slots import Slot
from formats.family.unplaced import has_other_mixer, why_unplaced
from formats.stored import Problem, Recogniser, StoredWeight
from formats.tensor import TensorInfo


@dataclass(frozen=True, slots=True)
class Matches:
    """The stored tensors beside the places of the family."""

    config: Config
    held: Mapping[str, TensorInfo]
    weights: Mapping[str, StoredWeight]
    recognisers: Sequence[Recogniser]
    dialect: Dialect
    spelling: Callable[[str], str]

    def cut(self, slots: Mapping[str, Slot]) -> tuple[dict[str, Atom], list[Problem]]:
        """Return the atoms of every place that is filled, and what is wrong with the others."""
        atoms: dict[str, Atom] = {}
        problems: list[Problem] = []
        for hub, slot in slots.items():
            if hub not in self.weights:
                problems += [self._misfit(hub, slot)] if hub in self.held else []
                continue
            wrong = self._check(self.weights[hub], slot)
            problems += [wrong] if wrong else []
            if wrong is None:
                atoms |= {atom.name: atom for atom in self._cut(self.weights[hub], slot)}
        return atoms, problems

    def coverage(self, slots: Mapping[str, Slot], unclaimed: Sequence[str]) -> Iterator[Problem]:
        """Yield a problem for each place without a tensor, and for each tensor without a place."""
        words = self.dialect.words
        for hub in slots:
            there = hub in self.weights or hub in self.held
            if not there and not has_other_mixer(hub, self.held):
                part = optional_part(hub)
                yield Problem(self.spelling(hub), "is missing", words.missing, part)
        for hub in (*self.weights, *unclaimed):
            if hub not in slots:
                reason = why_unplaced(hub, self.config)
                yield self._explain(hub) or Problem(self.held[hub].name, reason, words.strange)

    def _explain(self, hub: str) -> Problem | None:
        return explained(hub, self.held, self.recognisers)

    def _misfit(self, hub: str, slot: Slot) -> Problem:
        """Say why the tensor of this name is no weight for its place."""
        info = self.held[hub]
        wrong = self._wrong_shape(info.name, info.shape, slot) or self._explain(hub)
        unknown = f"has dtype {info.dtype}, expected BF16, F16, F32 or a known quantised form"
        return wrong or Problem(info.name, unknown, "convert a BF16 checkpoint")

    def _check(self, weight: StoredWeight, slot: Slot) -> Problem | None:
        name, role = weight.parts[0].name, slot.rule.role
        wrong = self._wrong_shape(name, weight.shape, slot)
        odd = weight.form.label and len(weight.shape) != 2 and role not in EXPERT_PIECES
        if wrong or not odd or self.dialect.kind not in (HUB_DIALECT, MLX):
            return wrong
        problem = f"is {weight.form.name} with shape {list(weight.shape)}, expected a matrix"
        return Problem(name, problem, "convert a BF16 checkpoint")

    def _wrong_shape(self, name: str, shape: Shape, slot: Slot) -> Problem | None:
        expected = self.dialect.stored_shape(slot, shape)
        if 0 in shape:
            remedy = "save the checkpoint again with all ranks gathered"
            return Problem(name, f"is empty (shape {list(shape)})", remedy)
        if shape == expected:
            return None
        symbols = slot.rule.shape
        fields = self.config.source_of(symbols)
        problem = (
            f"has shape {list(shape)}, expected {list(expected)} ({symbols})\n"
            f"  from  {self.config.origin}: {fields}"
        )
        if sorted(shape) != sorted(expected):
            cause = LOST if ABSENT in fields else "shape"
            return Problem(name, problem, self.dialect.words.shape, cause=cause)
        order = "it is transposed" if shape == expected[::-1] else "its axes are in another order"
        return Problem(name, f"{problem}\n  why   {order}", "save it in the hub's order")

    def _cut(self, weight: StoredWeight, slot: Slot) -> Iterator[Atom]:
        """Yield the atoms of one stored weight."""
        sizes, parts = self.config.sizes, tuple(part.name for part in weight.parts)
        plain = _renamed(parts[0], weight.name)
        for hub, role, pieces in pieces_of(slot, sizes):
            ops = pieces + self.dialect.ops_to_hub(role, slot, weight.shape, sizes)
            name, shape = hub.removesuffix(".weight"), shape_after(ops, weight.shape)
            values = shape, weight.dtype, weight.form
            yield Atom(name, hub, role, *values, plain, parts, ops, weight.shape)


def _renamed(stored: str, weight: str) -> str:
    """Return the stored name with the weight's own last segment: forms change nothing else."""
    last = weight.rpartition(".")[2]
    parent, _, own = stored.rpartition(".")
    return stored if own == last or not parent else f"{parent}.{last}"


def explained(
    hub: str, held: Mapping[str, TensorInfo], recognisers: Sequence[Recogniser]
) -> Problem | None:
    """Ask what is wrong with a tensor that no recogniser has taken."""
    problems = (one.explain(hub, held) for one in recognisers)
    return next((problem for problem in problems if problem), None)
