"""The plan: the whole artifact and every item of the job, before a weight is read.

An item is independent of every other and may be run twice, which gives workers and resume. A plan
is pure: the same source and recipe give the same plan, and its `digest` ties a journal to both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from formats.family.ops import Op
from formats.tensor import TensorInfo
from quant.scheme import Scheme
from qwen35_convert.recipe.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Output:
    """Where one encoded part of an atom goes: `nbytes` bytes from `offset` in tensor `name`.

    `key` is the scheme's word for the part: codes, scale.
    """

    key: str
    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Item:
    """The unit of streaming: one atom, the scheme it gets, its outputs.

    ops  what is done to its values before they are encoded: the transforms of GGUF
    """

    atom: Atom
    scheme: Scheme
    outputs: tuple[Output, ...]
    reason: str
    ops: tuple[Op, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of its outputs."""
        return sum(output.nbytes for output in self.outputs)


@dataclass(frozen=True, slots=True)
class Shard:
    """One output file: its tensors in file order, header, each tensor's byte offset, its size."""

    name: str
    infos: tuple[TensorInfo, ...]
    header: bytes
    offsets: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a conversion writes, known before a weight is read.

    container   the kind of artifact, by name
    files       whole files beside the shards, made when they are written
    described   what those files say, as far as it is not a file of the source: ties a journal
    importance  what an error in each column of an atom weighs, float32 [K], by its name
    inputs      the largest input of an atom, float32 [], by its name, where its scheme stores it
    computed    tensors that no item makes, by name: scales of an FP8 cache, which a text gives
    title       the model's name, if the files say it
    """

    container: str
    recipe: Recipe
    items: tuple[Item, ...]
    shards: tuple[Shard, ...]
    dropped: dict[str, int]
    notes: tuple[str, ...] = ()
    files: Mapping[str, Callable[[], bytes]] = field(default_factory=dict)
    described: Mapping[str, Any] = field(default_factory=dict)
    importance: Mapping[str, Tensor] = field(default_factory=dict)
    inputs: Mapping[str, Tensor] = field(default_factory=dict)
    computed: Mapping[str, Tensor] = field(default_factory=dict)
    title: str | None = None

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every output tensor by name."""
        return {info.name: info for shard in self.shards for info in shard.infos}

    @property
    def nbytes(self) -> int:
        """Bytes of all output files with tensors."""
        return sum(shard.nbytes for shard in self.shards)

    def schemes(self) -> dict[str, Scheme]:
        """Return the schemes in use by name: what is kept and cast, too."""
        return {item.scheme.name: item.scheme for item in self.items}

    def read_files(self, source: Checkpoint) -> list[Path]:
        """Every file of the source that the items are made from; of a slice not all of them."""
        more = self.recipe.quantize.files
        if self.recipe.only is None:
            return source.read_files() + more
        return source.files_of(item.atom for item in self.items) + more

    def _texts(self) -> list[Path]:
        """Return the text that calibrates, if it is not the bundled one."""
        calibrate = self.recipe.quantize.calibrate
        return [] if calibrate is None or calibrate.file is None else [Path(calibrate.file)]

    def digest(self, source: Checkpoint) -> str:
        """Return the SHA-256 that ties a journal to this plan and these source files."""
        read = {*source.read_files(), *self.read_files(source), *self._texts()}
        files = [source.identity(path) for path in sorted(read)]
        headers = [hashlib.sha256(shard.header).hexdigest() for shard in self.shards]
        contents = [self.recipe.model_dump(mode="json"), self.described, headers, files]
        return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()


def pack(units: Iterable[Sequence[TensorInfo]], limit: int) -> list[list[TensorInfo]]:
    """Part units in order among files of at most `limit` bytes; a larger unit gets its own."""
    packs: list[list[TensorInfo]] = [[]]
    size = 0
    for unit in units:
        nbytes = sum(info.nbytes for info in unit)
        if packs[-1] and size + nbytes > limit:
            packs.append([])
            size = 0
        packs[-1] += unit
        size += nbytes
    return packs
