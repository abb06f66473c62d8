"""An adapter beside its base model: what becomes of each stored tensor, before a byte is read.

Nothing of an adapter is left out in silence: a tensor that is none of PEFT's, that fits nowhere, or
whose shape is not the model's, is refused with all of its kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from formats.adapter.config import AdapterConfig, read_adapter_config
from formats.adapter.modules import LowRank, Modules, Trained
from formats.adapter.names import SAVE, WHOLE, Part, parse_part
from formats.adapter.places import Place, Places
from formats.adapter.tied import settle_tied
from formats.errors import FormatError
from formats.family.dialects import MLX
from formats.family.moves import Unstack
from formats.family.ops import apply_all
from formats.safetensors.adapters import ADAPTER_CONFIG, ADAPTER_FILE
from formats.safetensors.file import SafetensorsFile
from formats.safetensors.folder import CONTAINER
from formats.stored import Problem, by_cause, tell

if TYPE_CHECKING:
    from torch import Tensor

    from formats.checkpoint import Checkpoint

UNQUANTISED = "give the checkpoint that it was quantised from"


@dataclass(frozen=True, slots=True)
class Run:
    """A run of rows of a stored tensor, from `start`: what is added, or takes their place.

    added  its stacks are the run's rows, one after the other
    whole  [count, width]
    """

    start: int
    added: LowRank | None = None
    whole: Tensor | None = None

    @property
    def stop(self) -> int:
        """The row after its last."""
        if self.added is not None:
            return self.start + self.added.left.shape[0] * self.added.left.shape[1]
        assert self.whole is not None, "a run adds something, or takes a place"
        return self.start + len(self.whole)


@dataclass
class Change:
    """What becomes of one stored tensor: runs that take places, then runs that are added.

    The runs of each kind are in the order of their rows, and do not overlap.
    """

    whole: list[Run] = field(default_factory=list)
    added: list[Run] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that fits its base model.

    changes  by stored name of the base model's tensors
    """

    folder: Path
    file: SafetensorsFile
    config: AdapterConfig
    changes: Mapping[str, Change]


def open_adapter(folder: Path, base: Checkpoint) -> Adapter:
    """Return the adapter in a folder, held against its base model by headers.

    FormatError if the adapter is of another kind, not whole, or of another model; if the base model
    is quantised where it is changed, or spelt in another way than the hub's.
    """
    if base.container != CONTAINER or base.layout.kind == MLX:
        what = f"is {'spelt as MLX does' if base.container == CONTAINER else 'a GGUF file'}"
        raise FormatError(str(base.place), what, "a base model as on the hub, in safetensors")
    config = read_adapter_config(folder)
    file = _open_file(folder)
    parts = [parse_part(name) for name in file.infos]
    modules = Modules(file, config, Places(base))
    modules.problems += [part for part in parts if isinstance(part, Problem)]
    known = [part for part in parts if isinstance(part, Part)]
    trained = [*modules.read(settle_tied(known, base, config, file))]
    _refuse(modules.problems)
    _check_saved(config, known)
    return Adapter(folder, file, config, _changes(trained, modules.places))


def _open_file(folder: Path) -> SafetensorsFile:
    path = folder / ADAPTER_FILE
    if not path.is_file():
        raise FormatError(f"{folder}: {ADAPTER_FILE} is missing", fix=SAVE)
    file = SafetensorsFile(path)
    if not file.infos:
        raise FormatError(ADAPTER_FILE, "holds no tensor", "the factors of an adapter", SAVE)
    return file


def _refuse(problems: Sequence[Problem]) -> None:
    if problems:
        raise FormatError("\n".join(tell(some) for some in by_cause(problems)))


def _check_saved(config: AdapterConfig, parts: Iterable[Part]) -> None:
    """Refuse an adapter that has nothing of a module which its config says was trained whole."""
    whole = [f".{part.module}" for part in parts if part.kind == WHOLE]
    for name in config.saved:
        if not any(f".{name}." in module for module in whole):
            where = f"{ADAPTER_CONFIG}: modules_to_save"
            raise FormatError(f"{name} is missing in {ADAPTER_FILE}", where=where, fix=SAVE)


def _changes(trained: Iterable[Trained], places: Places) -> dict[str, Change]:
    changes: dict[str, Change] = defaultdict(Change)
    names: dict[tuple[str, int, bool], str] = {}
    for one in trained:
        for place in places.of(one.slot):
            _check_plain(place)
            change, run = changes[place.atom.stored], _run(one, place)
            (change.whole if run.added is None else change.added).append(run)
            key = place.atom.stored, run.start, run.added is None
            if names.setdefault(key, one.stored) != one.stored:
                raise FormatError(one.stored, f"changes the same weights as {names[key]}")
    for name, change in changes.items():
        for runs in (change.whole, change.added):
            runs.sort(key=lambda run: run.start)
            if any(run.start < before.stop for before, run in pairwise(runs)):
                raise FormatError(ADAPTER_FILE, f"changes weights of {name} twice")
    return dict(changes)


def _check_plain(place: Place) -> None:
    if place.atom.quantized:
        raise FormatError(
            place.atom.stored,
            f"is stored as {place.atom.scheme}",
            "BF16, F16 or F32, to which an adapter can be added",
            UNQUANTISED,
        )


def _run(trained: Trained, place: Place) -> Run:
    """Return what becomes of the rows of a place."""
    if trained.whole is not None:
        values = apply_all(place.cut, trained.whole)
        width = values.shape[-1] if values.dim() > 1 else 1
        return Run(place.start, whole=values.reshape(-1, width))
    added = trained.added
    assert added is not None, "what is not replaced is added to"
    if not place.cut:
        return Run(place.start, added)
    stacks = tuple(op for op in place.cut if isinstance(op, Unstack))
    left, right = apply_all(place.cut, added.left), apply_all(stacks, added.right)
    return Run(place.start, LowRank(left[None], right[None], added.scale))
