"""A weight as a checkpoint stores it: one tensor of numbers, or the parts of a scheme.

What the bytes of a part mean is known on the floor above (`quant`). Here a `StoredForm` says only
which stored tensors belong together, so that the layout can account for every one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from formats.tensor import TensorInfo

KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a checkpoint cannot be converted as it is, and what would help."""

    tensor: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.tensor} {self.problem}\n  fix   {self.remedy}"


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


class Recogniser(Protocol):
    """Finds the weights of some stored forms, as far as headers show them."""

    def recognise(self, infos: Mapping[str, TensorInfo]) -> Iterator[StoredWeight]:
        """Yield the weights that are stored so; `infos` are headers by names of the table."""
        ...

    def explain(self, name: str, infos: Mapping[str, TensorInfo]) -> Problem | None:
        """Say what is wrong with a tensor that nobody has taken, if it looks like one of these."""
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
