"""Recognise a checkpoint by its tensors, not by its class name, and account for every one.

    stored names -> names of the table -> weights in their stored forms -> places in the family

Every layout is understood once, here; what comes out is a `Layout`.

Coverage is total both ways: a stored tensor without a place is a problem, and so is a place
without a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from formats.family.activation_scales import (
    activation_notes,
    scaled_by,
    take_activation_scales,
)
from formats.family.config import Config
from formats.family.dialects import CONV1D, HUB_DIALECT, MLX, Dialect, dialect_of
from formats.family.layout import Atom, Layout
from formats.family.leftovers import leftover
from formats.family.lost_fields import lost_fields
from formats.family.matches import Matches, explained
from formats.family.names import PARTS, normalise, optional_part, rename, strip_strangers
from formats.family.roles import ROLES
from formats.family.rules import template
from formats.family.slots import family
from formats.family.traits import form_of, kind_of, notes_of, tied_by, unused_notes
from formats.family.unused import copies, is_buffer
from formats.stored import Problem, Recogniser, StoredWeight
from formats.tensor import TensorInfo


@dataclass(frozen=True, slots=True)
class _Sorted:
    """Stored tensors by what they are.

    names      of all but buffers: the stored one by the table's
    held       by the table's names, what is to be placed
    weights    what is made of them
    unclaimed  the names of those that are part of no weight
    buffers    stored names of what every engine computes
    twins      stored names of copies, and of what
    scales     stored names of scales of activations
    coded      stored names of all parts of quantised weights
    leftovers  what other quantisers left, by the table's names
    problems   of the names
    """

    names: dict[str, str]
    held: dict[str, TensorInfo]
    weights: dict[str, StoredWeight]
    unclaimed: list[str]
    buffers: tuple[str, ...]
    twins: dict[str, str]
    scales: tuple[str, ...]
    coded: dict[str, None]
    leftovers: dict[str, Problem]
    problems: list[Problem]

    def notes(self) -> list[str]:
        """Return what is said of tensors that are not read."""
        scales = activation_notes([*self.scales, *filter(scaled_by, self.coded)])
        return [*unused_notes([*self.buffers], self.twins), *scales]


def recognise(
    infos: Mapping[str, TensorInfo],
    config: Config,
    recognisers: Sequence[Recogniser],
    dialect: Dialect | None = None,
) -> Layout:
    """Match stored tensors to the family; problems are collected, not raised.

    recognisers  of the stored forms that may occur, asked in this order
    dialect      how names are spelt; None: the hub's way or MLX's, whichever the tensors show
    """
    recognisers = [one.told(config.quantization or {}) for one in recognisers]
    stored = _sort(infos, config, recognisers, dialect)
    held, names, leftovers = stored.held, stored.names, [*stored.leftovers.values()]
    form = form_of([*stored.weights, *stored.unclaimed], config)
    dialect = dialect or dialect_of(held, config)
    slots = {slot.hub: slot for slot in family(config.sizes, config.layer_types, form)}
    spelling = dialect.spelling(names, config)
    matches = Matches(config, held, stored.weights, recognisers, dialect, spelling)
    atoms, misfits = matches.cut(slots)
    tied, tie_notes, tie_problems = tied_by(config, form)
    problems = [*leftovers, *stored.problems, *matches.coverage(slots, stored.unclaimed)]
    problems += lost_fields(misfits, config, held)
    problems += [_from_mlx(held)] if dialect.kind == MLX and form.mtp_layers else []
    if leftovers and not atoms:  # nothing of a model: it is not that something is missing
        problems, tie_problems = leftovers, []
    family_notes = notes_of(held, config, form, mlx=dialect.kind == MLX)
    return Layout(
        kind=kind_of(held, config, form) if dialect.kind == HUB_DIALECT else dialect.kind,
        form=form,
        atoms=atoms,
        tied=tied,
        quantized=_quantized(atoms),
        spelling=spelling,
        notes=[*tie_notes, *family_notes, *stored.notes()],
        problems=_parted([*problems, *tie_problems, *config.problems], names),
        buffers=stored.buffers,
        copies=stored.twins,
        activation_scales=stored.scales,
        headless=config.headless and not form.head,
    )


def _sort(
    infos: Mapping[str, TensorInfo],
    config: Config,
    recognisers: Sequence[Recogniser],
    dialect: Dialect | None,
) -> _Sorted:
    """Say what each stored tensor is; a dialect that is given knows all of its own."""
    buffers = {} if dialect else {n: info for n, info in infos.items() if is_buffer(info)}
    infos = {name: info for name, info in infos.items() if name not in buffers}
    names, collisions = dialect.rename(infos, config) if dialect else _hub_names(infos)
    held = {hub: infos[stored] for hub, stored in names.items()}
    twins = {} if dialect else _take_copies(held)
    weights = _weights(held, recognisers)
    coded = _coded_parts(weights)
    scales = () if dialect else take_activation_scales(held, coded)
    weights = {hub: weight for hub, weight in weights.items() if weight.parts[0].name not in scales}
    leftovers = {} if dialect else _leftovers(held, weights, recognisers)
    for hub in leftovers:
        del held[hub]
        weights.pop(hub, None)
    unclaimed = _unclaimed(held, weights)
    return _Sorted(
        names, held, weights, unclaimed, tuple(buffers), twins, scales, coded, leftovers, collisions
    )


def _hub_names(infos: Mapping[str, TensorInfo]) -> tuple[dict[str, str], list[Problem]]:
    """Return stored name by the table's, under whatever prefix."""
    names, collisions = rename(infos)
    names, wrapped = strip_strangers(names)
    return names, [*collisions, *wrapped]


def _take_copies(held: dict[str, TensorInfo]) -> dict[str, str]:
    """Take out what has to be a copy of another tensor; return what of what."""
    twins = {hub: held[original].name for hub, original in copies(held)}
    return {held.pop(hub).name: original for hub, original in twins.items()}


def _parted(problems: Iterable[Problem], names: Mapping[str, str]) -> list[Problem]:
    """Return each problem once, with the part of the model that its tensor belongs to."""
    hubs = {stored: hub for hub, stored in names.items()}
    return [
        replace(
            problem,
            part=problem.part
            or optional_part(hubs.get(problem.tensor) or normalise(problem.tensor)),
        )
        for problem in dict.fromkeys(problems)
    ]


def _weights(
    held: Mapping[str, TensorInfo], recognisers: Sequence[Recogniser]
) -> dict[str, StoredWeight]:
    """Return the weights by name; a tensor belongs to the first recogniser that knows it."""
    weights: dict[str, StoredWeight] = {}
    claimed: set[str] = set()
    for recogniser in recognisers:
        for weight in recogniser.recognise(held):
            names = {part.name for part in weight.parts}
            if claimed.isdisjoint(names):
                weights[weight.name] = weight
                claimed |= names
    return weights


def _coded_parts(weights: Mapping[str, StoredWeight]) -> dict[str, None]:
    """Return the stored names of the parts of all quantised weights, in their order."""
    coded = (w.parts for w in weights.values() if w.form.label)
    return dict.fromkeys(part.name for parts in coded for part in parts)


def _leftovers(
    held: Mapping[str, TensorInfo],
    weights: Mapping[str, StoredWeight],
    recognisers: Sequence[Recogniser],
) -> dict[str, Problem]:
    """Return what other quantisers and trainers left, which is part of no quantised weight."""
    coded = _coded_parts(weights)
    suspects = ((hub, leftover(info)) for hub, info in held.items() if info.name not in coded)
    problems = {hub: problem for hub, problem in suspects if problem}
    return {hub: explained(hub, held, recognisers) or own for hub, own in problems.items()}


def _unclaimed(held: Mapping[str, TensorInfo], weights: Mapping[str, StoredWeight]) -> list[str]:
    """Return the names of tensors that are part of no weight."""
    claimed = {part.name for weight in weights.values() for part in weight.parts}
    return [hub for hub, info in held.items() if info.name not in claimed]


def _from_mlx(held: Mapping[str, TensorInfo]) -> Problem:
    conv = next(info for hub, info in held.items() if template(hub)[0] == CONV1D)
    problem = (
        f"has shape {list(conv.shape)}, as in an MLX checkpoint, "
        "whose MTP norms may or may not be shifted"
    )
    return Problem(conv.name, problem, "convert the original checkpoint", part=PARTS["mtp"])


def _quantized(atoms: Mapping[str, Atom]) -> str | None:
    """Name the form that most quantised weights have, by their elements; None: there are none.

    An embedding is passed over: files of other types often have it in one of its own.
    """
    sizes: Counter[str] = Counter()
    for atom in atoms.values():
        if atom.form.label is not None and not ROLES[atom.role].gathered:
            sizes[atom.form.label] += prod(atom.shape)
    return next((label for label, _ in sizes.most_common(1)), None)
