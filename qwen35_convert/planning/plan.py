"""The plan: every row of the job, made before a weight is read and before a byte is written.

A row is independent of every other and may be run twice, which gives workers and resume. A plan
is pure: the same source and recipe give the same plan, and its `digest` ties a journal to both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from formats.family.ops import Op
from formats.gguf.file import ALIGNMENT, Kv, build_header
from formats.tensor import TensorInfo
from quant.ggml.scheme import Ggml
from quant.scheme import KEEP, Scheme, get_scheme
from qwen35_convert.recipe import Recipe

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Output:
    """Where one encoded part of an atom goes: `nbytes` bytes from `offset` in tensor `name`.

    `suffix` is the scheme's name of the part: "" the weight, "_scale_inv" its scale.
    """

    suffix: str
    name: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """The unit of streaming: one atom, its scheme, its outputs.

    dtype  type in which a kept atom is stored
    ops    what is done to its values before: the transforms of GGUF
    """

    atom: Atom
    scheme: str
    outputs: tuple[Output, ...]
    reason: str
    dtype: str
    ops: tuple[Op, ...] = ()


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
    """The whole job.

    config   what config.json is to say; empty for a GGUF file, whose header says it
    weights  importance of the columns of an atom by its name, float32 [K]
    """

    recipe: Recipe
    rows: tuple[Row, ...]
    shards: tuple[Shard, ...]
    config: dict[str, Any]
    dropped: dict[str, int]
    notes: tuple[str, ...] = field(default=())
    weights: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """Every output tensor by name."""
        return {info.name: info for shard in self.shards for info in shard.infos}

    @property
    def nbytes(self) -> int:
        """Bytes of all output files with tensors."""
        return sum(shard.nbytes for shard in self.shards)

    def schemes(self) -> dict[str, Scheme]:
        """Return the schemes in use, ready to encode."""
        used = sorted({row.scheme for row in self.rows} - {KEEP})
        if self.recipe.export.format == "gguf":
            return {name: Ggml(name.upper()) for name in used}
        return make_schemes(used, self.recipe.quantize.scale)

    def read_files(self, source: Checkpoint) -> list[Path]:
        """Every file of the source that the rows are made from; of a slice not all of them."""
        imatrix = self.recipe.quantize.imatrix
        more = [Path(imatrix)] if imatrix else []
        if self.recipe.only is None:
            return source.read_files() + more
        return source.files_of(row.atom for row in self.rows) + more

    def digest(self, source: Checkpoint) -> str:
        """Return the SHA-256 that ties a journal to this plan and these source files."""
        read = {*source.read_files(), *self.read_files(source)}
        files = [source.identity(path) for path in sorted(read)]
        headers = [hashlib.sha256(shard.header).hexdigest() for shard in self.shards]
        said = [self.recipe.model_dump(mode="json"), self.config, headers, files]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def make_schemes(names: Sequence[str], scale: str) -> dict[str, Scheme]:
    """Return schemes that may stand in one artifact.

    The official Qwen layout knows 128x128 blocks only; beside any other scheme, blocks take
    compressed-tensors' name for a scale.
    """
    suffix = "_scale_inv" if len(names) == 1 else "_scale"
    return {name: get_scheme(name, scale, suffix) for name in names}


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


def gguf_shard(name: str, pairs: Sequence[Kv], infos: Sequence[TensorInfo]) -> Shard:
    """Return a GGUF file: header, offsets and size, zeros after the last tensor included."""
    header, offsets = build_header(pairs, infos)
    end = offsets[-1] + infos[-1].nbytes
    return Shard(name, tuple(infos), header, tuple(offsets), -(-end // ALIGNMENT) * ALIGNMENT)
