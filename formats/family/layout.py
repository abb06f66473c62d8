"""Recognise a checkpoint by its tensors, not by its class name, and account for every one.

    stored names -> names of the table -> weights in their stored forms -> places in the family

The result is a list of atoms: the tensors of the family at their finest (one projection of one
expert), each with the stored tensors it comes from and the operations that cut it out. Converting,
verifying and running all read atoms, so every layout is understood once, here.

Coverage is total both ways: a stored tensor without a place is a problem, and so is a place
without a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from formats.family.activation_scales import (
    activation_notes,
    scaled_by,
    take_activation_scales,
)
from formats.family.config import ABSENT, Config
from formats.family.dialects import CONV1D, HUB_DIALECT, MLX, Dialect, dialect_of
from formats.family.lost_fields import LOST, lost_fields
from formats.family.names import (
    PARTS,
    leftover,
    normalise,
    optional_part,
    rename,
    strip_strangers,
)
from formats.family.ops import Op, Shape, shape_after
from formats.family.pieces import EXPERT_PIECES, pieces_of
from formats.family.roles import EXPERT, ROLES
from formats.family.rules import Form, Slot, family, template
from formats.family.traits import form_of, kind_of, notes_of, tied_by, unused_notes
from formats.family.unplaced import has_other_mixer, why_unplaced
from formats.family.unused import copies, is_buffer
from formats.stored import Problem, Recogniser, StoredForm, StoredWeight
from formats.tensor import TensorInfo


@dataclass(frozen=True, slots=True)
class Atom:
    """One tensor of the family: where it is stored and how it is cut out.

    dtype   of its values once decoded
    form    how the stored weight is encoded
    weight  its name in the checkpoint, as if it were stored plainly
    parts   names of the stored tensors, in the form's order; the first has the weight's rows
    whole   shape of the stored weight that it is cut out of; None: its own
    """

    name: str
    hub: str
    role: str
    shape: Shape
    dtype: str
    form: StoredForm
    weight: str
    parts: tuple[str, ...]
    ops: tuple[Op, ...] = ()
    whole: Shape | None = None

    @property
    def stored(self) -> str:
        """Name of the stored tensor that has its rows."""
        return self.parts[0]

    @property
    def scheme(self) -> str:
        """Name of its stored form."""
        return self.form.name

    @property
    def quantized(self) -> bool:
        """Whether it is stored in codes, not in numbers."""
        return self.form.label is not None

    @property
    def group(self) -> str | None:
        """Key of the linears that engines give one scheme with this one."""
        return fused_group(self.name, self.role)

    @property
    def matrix(self) -> str:
        """Key of the linears that engines run as one matrix with this one; its own name if none."""
        return fused_matrix(self.name, self.role)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a checkpoint is, and its atoms in the family's order.

    spelling           gives the stored name of a tensor of the table, or what it would be
    buffers            stored tensors that nobody reads: every engine computes them
    copies             stored tensors that must be copies of others, which are read in their place
    activation_scales  stored tensors that no weight depends on
    tied               it stores no head: the embedding serves as one, if anything does
    headless           its class has none, and none is stored
    """

    kind: str
    form: Form
    atoms: dict[str, Atom]
    tied: bool
    quantized: str | None
    spelling: Callable[[str], str]
    headless: bool = False
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    buffers: tuple[str, ...] = ()
    copies: dict[str, str] = field(default_factory=dict)
    activation_scales: tuple[str, ...] = ()

    def problems_without(self, parts: Iterable[str]) -> list[Problem]:
        """Return the problems that are left when these parts (vision, mtp) are left out."""
        return [problem for problem in self.problems if problem.part not in {*parts}]


def fused_group(name: str, role: str) -> str | None:
    """Return the group key: the parent module and the fused name, as `layers.3.self_attn.qkv`."""
    fused = ROLES[role].fused
    if fused == "experts":
        return name.rsplit(".", 2)[0]
    return f"{name.rsplit('.', 1)[0]}.{fused}" if fused else None


def fused_matrix(name: str, role: str) -> str:
    """Return the key of one matrix: gate and up of one expert, but not all experts of a layer."""
    parent, _, projection = name.rpartition(".")
    fused = ROLES[projection if role == EXPERT else role].fused
    return f"{parent}.{fused}" if fused else name


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
    buffers = {} if dialect else {n: info for n, info in infos.items() if is_buffer(info)}
    infos = {name: info for name, info in infos.items() if name not in buffers}
    recognisers = [one.told(config.quantization or {}) for one in recognisers]
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
    form = form_of([*weights, *unclaimed], config)
    dialect = dialect or dialect_of(held, config)
    slots = {slot.hub: slot for slot in family(config.sizes, config.layer_types, form)}
    spelling = dialect.spelling(names, config)
    matches = _Matches(config, held, weights, recognisers, dialect, spelling)
    atoms, misfits = matches.cut(slots)
    tied, tie_notes, tie_problems = tied_by(config, form)
    problems = [*leftovers.values(), *collisions, *matches.coverage(slots, unclaimed)]
    problems += lost_fields(misfits, config, held)
    problems += [_from_mlx(held)] if dialect.kind == MLX and form.mtp_layers else []
    if leftovers and not atoms:  # nothing of a model: it is not that something is missing
        problems, tie_problems = [*leftovers.values()], []
    return Layout(
        kind=kind_of(held, config, form) if dialect.kind == HUB_DIALECT else dialect.kind,
        form=form,
        atoms=atoms,
        tied=tied,
        quantized=_quantized(atoms),
        spelling=matches.spelling,
        notes=[
            *tie_notes,
            *notes_of(held, config, form, mlx=dialect.kind == MLX),
            *unused_notes([*buffers], twins),
            *activation_notes([*scales, *filter(scaled_by, coded)]),
        ],
        problems=_parted([*problems, *tie_problems, *config.problems], names),
        buffers=tuple(buffers),
        copies=twins,
        activation_scales=scales,
        headless=config.headless and not form.head,
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
    found = {hub: problem for hub, problem in suspects if problem}
    return {hub: _explained(hub, held, recognisers) or said for hub, said in found.items()}


def _explained(
    hub: str, held: Mapping[str, TensorInfo], recognisers: Sequence[Recogniser]
) -> Problem | None:
    """Ask what is wrong with a tensor that no recogniser has taken."""
    problems = (one.explain(hub, held) for one in recognisers)
    return next((problem for problem in problems if problem), None)


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


@dataclass(frozen=True, slots=True)
class _Matches:
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
        return _explained(hub, self.held, self.recognisers)

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


def _quantized(atoms: Mapping[str, Atom]) -> str | None:
    """Name the form of the quantised weights, by the first of them; None: there are none.

    An embedding is passed over: files of other types often have it in one of its own.
    """
    first = (a for a in atoms.values() if a.quantized and not ROLES[a.role].gathered)
    return next((atom.form.label for atom in first), None)
