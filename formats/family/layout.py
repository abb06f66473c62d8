"""A recognised checkpoint: its atoms, and what else is stored.

An atom is a tensor of the family at its finest (one projection of one expert), with the stored
tensors it comes from and the operations that cut it out. Converting, verifying and running all read
atoms; `recognise` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from formats.family.ops import Op, Shape
from formats.family.roles import EXPERT, ROLES
from formats.family.slots import Form
from formats.stored import Problem, StoredForm


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
