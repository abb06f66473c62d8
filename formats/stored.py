"""A weight as a checkpoint stores it: one tensor of numbers, or the parts of a scheme.

What the bytes of a part mean is known on the floor above (`quant`). Here a `StoredForm` says only
which stored tensors belong together, so that the layout can account for every one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from formats.tensor import TensorInfo

KEEP = "keep"
# Traits of a form beside its label.
ZEROS, ORDERED, ONE_GROUP = "zero points", "g_idx", "rows of one group"
MAX_NAMED = 3
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a checkpoint cannot be converted as it is, and what would help.

    part   what can be left out and would take the problem with it: vision or mtp
    cause  what problems with other words have in common, so that they are told as one
    """

    tensor: str
    problem: str
    remedy: str
    part: str = ""
    cause: str = ""

    def __str__(self) -> str:
        return tell([self])


def tell(problems: Sequence[Problem]) -> str:
    """Return problems of one cause as one message: the first of them, and how many more."""
    first, *more = problems
    text = f"{first.tensor} {first.problem}"
    if more:
        names = ", ".join(problem.tensor for problem in more[:MAX_NAMED])
        text += f"\n  and   {len(more)} more: {names}{' ...' if more[MAX_NAMED:] else ''}"
    return f"{text}\n  fix   {first.remedy}"


def by_cause(problems: Iterable[Problem]) -> list[list[Problem]]:
    """Gather problems of one cause, in the order in which causes first appear.

    Without a cause it is what they say that counts, numbers aside: layers differ by them.
    """
    causes: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        cause = problem.cause or NUMBER.sub("#", problem.problem)
        causes.setdefault((cause, problem.remedy, problem.part), []).append(problem)
    return list(causes.values())


class StoredForm(Protocol):
    """How one weight is stored."""

    @property
    def name(self) -> str:
        """What recipes and reports call it."""
        ...

    @property
    def label(self) -> str | None:
        """What a checkpoint of such weights is called; None if they are plain numbers."""
        ...

    def traits(self, columns: int) -> frozenset[str]:
        """Return what engines tell apart in a weight of this form and of so many columns."""
        ...


class Recogniser(Protocol):
    """Finds the weights of some stored forms, as far as headers show them."""

    def recognise(self, infos: Mapping[str, TensorInfo]) -> Iterator[StoredWeight]:
        """Yield the weights that are stored so; `infos` are headers by names of the table."""
        ...

    def explain(self, name: str, infos: Mapping[str, TensorInfo]) -> Problem | None:
        """Say what is wrong with a tensor that nobody has taken, if it looks like one of these."""
        ...

    def told(self, block: Mapping[str, Any]) -> Recogniser:
        """Return it as it finds weights beside this quantization_config, which headers need."""
        ...


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """One weight and its parts.

    name   of the weight in the table's names, as if it were plain numbers
    shape  of its values
    dtype  of its values once decoded
    parts  the stored tensors, in the form's order; the first has the weight's rows
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    form: StoredForm
    parts: tuple[TensorInfo, ...]
