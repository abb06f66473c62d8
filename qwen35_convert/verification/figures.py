"""What an artifact comes to: how large it is, and its error by layer and role.

Vision and the MTP head are no part of the language model: whether they are kept has nothing to do
with its predictions of the next token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from formats.checkpoint import Checkpoint
from formats.family.names import optional_part
from quant.measure import Error
from qwen35_convert.verification.compare import Compared

LAYERS = "layers"


@dataclass(frozen=True, slots=True)
class Size:
    """How large a checkpoint is.

    nbytes   of all its tensors
    model    of those of the language model alone
    weights  that the language model has, whatever they are stored in
    """

    nbytes: int
    model: int
    weights: int

    @staticmethod
    def of(checkpoint: Checkpoint) -> Size:
        """Return the size that the headers tell."""
        infos = checkpoint.infos()
        atoms = [a for a in checkpoint.layout.atoms.values() if not optional_part(a.hub)]
        parts = {part for atom in atoms for part in atom.parts}
        return Size(
            nbytes=sum(info.nbytes for info in infos.values()),
            model=sum(infos[part].nbytes for part in parts),
            weights=sum(prod(atom.shape) for atom in atoms),
        )

    @property
    def bits(self) -> float:
        """Bits per weight of the language model: scales, norms and all."""
        return 8 * self.model / self.weights if self.weights else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {
            "bytes": self.nbytes,
            "model_bytes": self.model,
            "weights": self.weights,
            "bits_per_weight": round(self.bits, 4),
        }


NOTHING = Size(0, 0, 0)


@dataclass(frozen=True, slots=True)
class RoleError:
    """What the tensors of one role lost in one place.

    place         a layer (`layers.3`), or what is none: embed_tokens, lm_head, norm, mtp, visual
    layer         its number; None: it is no layer
    tensors       how many there are
    relative_rms  of those that are quantised together; None: all are kept
    """

    place: str
    layer: int | None
    role: str
    tensors: int
    relative_rms: float | None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def by_role(compared: Iterable[Compared]) -> list[RoleError]:
    """Return the error of each role in each place, in the order in which tensors are."""
    sums: dict[tuple[str, int | None, str], Error] = {}
    counts: Counter[tuple[str, int | None, str]] = Counter()
    for one in compared:
        key = (*_place(one.name), one.role)
        counts[key] += 1
        total = sums.setdefault(key, Error())
        if one.error.count:
            total += one.error
    return [
        RoleError(*key, counts[key], error.as_dict()["relative_rms"] if error.count else None)
        for key, error in sums.items()
    ]


def _place(name: str) -> tuple[str, int | None]:
    head, *rest = name.split(".")
    return (f"{LAYERS}.{rest[0]}", int(rest[0])) if head == LAYERS else (head, None)
