"""The modules of an adapter: factors that belong together, held against the model's shapes.

    a matrix [N, K]         A [r, K]      B [N, r]       change = scale * B @ A
    an embedding [V, H]     A [r, V]      B [H, r]       change = scale * (B @ A)^T
    experts [E, R, K]       A [E*r, K]    B [R, r*E]     rows of A by expert, columns of B by rank
                     or     A [E*r, R]    B [K, r*E]     peft 0.17 to 0.19, change transposed

Source: peft 0.21.2 and 0.17.1, `Linear`, `Embedding` and `ParamWrapper.get_delta_weight`. Where R
and K are equal the two forms of experts have one shape, and only the version says which it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from formats.adapter.config import AdapterConfig
from formats.adapter.names import (
    BIAS,
    LEFT,
    LEFT_ROWS,
    PEFT_MERGE,
    RIGHT,
    RIGHT_ROWS,
    SAVE,
    WHOLE,
    Part,
)
from formats.family.ops import Shape
from formats.family.pieces import EXPERT_PIECES
from formats.family.rules import EXPERTS_FUSED
from formats.family.slots import Slot
from formats.stored import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from formats.adapter.places import Places
    from formats.safetensors.file import SafetensorsFile

KINDS = ({LEFT, RIGHT}, {LEFT, RIGHT, BIAS}, {LEFT_ROWS, RIGHT_ROWS})
# Parameters of a module of fused experts, in the order in which they are wrapped.
PARAMETERS = tuple(rule.hub.rpartition(".")[2] for rule in EXPERTS_FUSED)
SWAPPED_SINCE = (0, 20)
FLOATS = ("BF16", "F16", "F32")
TELL_VERSION = "write the peft_version that saved it into adapter_config.json"
TRAINED_ON = "give the model that the adapter was trained on"
WITHOUT_BIAS = "train it without lora_bias: the layer has no bias to which one could be added"
CONFIG = "use the adapter_config.json that belongs to these tensors"


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to a tensor of the family: scale * left @ right.

    left   [S, R, r], of S matrices that are stacked
    right  [S, r, K]
    """

    left: Tensor
    right: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class Trained:
    """A tensor of the family that an adapter changes.

    stored  the adapter's name of one of the tensors
    added   what is added; None: `whole` takes its place
    """

    stored: str
    slot: Slot
    added: LowRank | None = None
    whole: Tensor | None = None


@dataclass
class Modules:
    """Reads the modules of an adapter; what is wrong is collected.

    parts  by module and depth, by kind
    """

    file: SafetensorsFile
    config: AdapterConfig
    places: Places
    problems: list[Problem] = field(default_factory=list)

    def read(self, parts: Iterable[Part]) -> Iterator[Trained]:
        """Yield every tensor of the family that is changed."""
        groups: dict[tuple[str, int], dict[str, Part]] = {}
        for part in parts:
            if part.kind == WHOLE:
                yield from self._whole(part)
            else:
                groups.setdefault((part.module, part.depth), {})[part.kind] = part
        for (module, depth), group in groups.items():
            if set(group) in KINDS:
                yield from self._module(module, depth, group)
            else:
                first, names = next(iter(group.values())), " and ".join(sorted(group))
                problem = f"is incomplete: of lora_A and lora_B there is {names} alone"
                self.problems.append(Problem(first.stored, problem, SAVE, cause="half"))

    def _whole(self, part: Part) -> Iterator[Trained]:
        slot = self._slot(part.hub, part)
        if slot is not None and self._fits({part: slot.shape}, slot):
            yield Trained(part.stored, slot, whole=self._read(part))

    def _module(self, module: str, depth: int, group: Mapping[str, Part]) -> Iterator[Trained]:
        first = next(iter(group.values()))
        name = self._parameter(first.hub, module, depth)
        key = module if name == "weight" else f"{module}.{name}"
        slot = self._slot(f"{first.hub}.{name}", first)
        if slot is None:
            return
        added = self._added(slot, group, key)
        if added is not None:
            yield Trained(first.stored, slot, added)
            yield from self._bias(group, first.hub, added.scale)

    def _parameter(self, hub: str, module: str, depth: int) -> str:
        """Return the name of the parameter that a module's factors change."""
        if self.places.slot(f"{hub}.{PARAMETERS[0]}") is None:
            return "weight"
        trained = [name for name in PARAMETERS if self._is_parameter(f"{module}.{name}")]
        return trained[-1 - depth] if depth < len(trained) else "weight"

    def _is_parameter(self, name: str) -> bool:
        return any(f".{name}".endswith(f".{wanted}") for wanted in self.config.parameters)

    def _slot(self, hub: str, part: Part, remedy: str = TRAINED_ON) -> Slot | None:
        slot = self.places.slot(hub)
        if slot is None or not self.places.of(slot):
            problem = f"changes {hub.removesuffix('.weight')}, which the base model does not have"
            self.problems.append(Problem(part.stored, problem, remedy, cause="absent"))
            return None
        return slot

    def _added(self, slot: Slot, group: Mapping[str, Part], key: str) -> LowRank | None:
        """Return what the factors of a module add to a tensor; None if they do not fit it."""
        r, scale = self.config.rank(key), self.config.scale(key)
        if slot.rule.role in EXPERT_PIECES:
            return self._experts(slot, group, r, scale)
        if len(slot.shape) != 2:
            problem = f"is LoRA of {slot.name}, which is not a matrix but {list(slot.shape)}"
            self.problems.append(Problem(group[RIGHT].stored, problem, PEFT_MERGE))
            return None
        rows, columns = slot.shape
        if LEFT_ROWS in group:
            left, right = group[LEFT_ROWS], group[RIGHT_ROWS]
            if self._fits({left: (r, rows), right: (columns, r)}, slot):
                return LowRank(self._read(left).mT[None], self._read(right).mT[None], scale)
        else:
            left, right = group[LEFT], group[RIGHT]
            if self._fits({left: (rows, r), right: (r, columns)}, slot):
                return LowRank(self._read(left)[None], self._read(right)[None], scale)
        return None

    def _experts(
        self, slot: Slot, group: Mapping[str, Part], r: int, scale: float
    ) -> LowRank | None:
        count, rows, columns = slot.shape
        a, b = group[RIGHT], group[LEFT]
        now = {a: (count * r, columns), b: (rows, r * count)}
        before = {a: (count * r, rows), b: (columns, r * count)}
        swapped = before if self._has(before) else now
        if self._has(now) and self._has(before):
            version = minor_version(self.config.version)
            if version is None:
                problem = (
                    f"does not show how it was trained: {slot.name} has {rows} rows, {columns} "
                )
                self.problems.append(Problem(a.stored, f"{problem}columns", TELL_VERSION))
                return None
            swapped = now if version >= SWAPPED_SINCE else before
        if not self._fits(swapped, slot):
            return None
        by_expert = self._read(a).view(count, r, -1)
        by_rank = self._read(b).view(-1, r, count).permute(2, 0, 1)
        if swapped is now:
            return LowRank(by_rank, by_expert, scale)
        return LowRank(by_expert.mT, by_rank.mT, scale)

    def _bias(self, group: Mapping[str, Part], hub: str, scale: float) -> Iterator[Trained]:
        import torch

        part = group.get(BIAS)
        slot = None if part is None else self._slot(f"{hub}.bias", part, WITHOUT_BIAS)
        if part is not None and slot is not None and self._fits({part: slot.shape}, slot):
            column, one = self._read(part).view(1, -1, 1), torch.ones(1, 1, 1)
            yield Trained(part.stored, slot, LowRank(column, one, scale))

    def _read(self, part: Part) -> Tensor:
        return self.file.read(part.stored)

    def _has(self, shapes: Mapping[Part, Shape]) -> bool:
        return all(self.file.infos[part.stored].shape == shape for part, shape in shapes.items())

    def _fits(self, shapes: Mapping[Part, Shape], slot: Slot) -> bool:
        """Whether tensors have these shapes and hold numbers; what is not so is a problem."""
        before = len(self.problems)
        for part, shape in shapes.items():
            info = self.file.infos[part.stored]
            if info.shape != shape:
                problem = (
                    f"has shape {list(info.shape)}, expected {list(shape)}: "
                    f"{slot.name} is {list(slot.shape)} ({slot.rule.shape})"
                )
                self.problems.append(Problem(part.stored, problem, CONFIG, cause="shape"))
            elif info.dtype not in FLOATS:
                problem = f"has dtype {info.dtype}, expected {', '.join(FLOATS)}"
                self.problems.append(Problem(part.stored, problem, SAVE))
        return len(self.problems) == before


def minor_version(version: str | None) -> tuple[int, int] | None:
    """Return (0, 20) of 0.20.1; None if it is not told, or not that of a release."""
    words = (version or "").split(".")
    if len(words) < 3 or not all(word.isascii() and word.isdigit() for word in words):
        return None
    return int(words[0]), int(words[1])
