"""`qwen35 imatrix`: what a text brings to every linear, as llama.cpp's imatrix file.

The text is cut into chunks that are run on their own, layer by layer; experts that no token reached
are reported, because a quantiser can only guess for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from formats.errors import NOTHING
from formats.family.moves import Tile
from formats.gguf.header import Kv
from formats.gguf.imatrix import CHUNKS, COUNTS, DATASETS, IMATRIX, SUMS, TYPE
from formats.gguf.names import gguf_name, ops_to_gguf
from formats.tensor import TensorInfo
from qwen35_convert.containers.gguf.shards import gguf_shard
from qwen35_convert.durable import make_folders, reserve, write_all, writing, written_aside
from qwen35_convert.text.tokens import CHUNK, DEFAULT, chunked, text_ids
from qwen35_convert.write.file_sink import check_out_files
from qwen35_convert.write.out import partial_of

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImatrixReport:
    """What was collected: tensors, tokens, and the experts that no token reached."""

    out: Path
    tensors: int
    tokens: int
    chunks: int
    unseen: list[str]

    def as_dict(self) -> dict[str, Any]:
        """Return what `imatrix --json` prints."""
        return {
            "out": str(self.out),
            "tensors": self.tensors,
            "tokens": self.tokens,
            "chunks": self.chunks,
            "unseen": self.unseen,
        }


def make_imatrix(
    checkpoint: Checkpoint,
    text: str,
    out: Path,
    *,
    chunks: int | None = None,
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> ImatrixReport:
    """Collect the importance matrix over a text and write it to `out`, whole or not at all.

    RecipeError if the text cannot be read; OutputError if `out` may not be written.
    """
    import torch

    from runtime.imatrix import collect

    check_out_files(out, (), checkpoint.read_files(), overwrite=overwrite, kind=IMATRIX)
    parts = chunks_of(checkpoint, text, chunks)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sums = collect(checkpoint, parts, device=device, progress=progress)
    layers = len(checkpoint.config.layer_types)
    stacked = sums.stacked(
        lambda name: gguf_name(_hub(checkpoint, name), layers),
        lambda name: column_order(checkpoint, name),
    )
    dataset = "qwen35's own" if text == DEFAULT else Path(text).name
    _write(out, stacked, dataset, len(parts))
    return ImatrixReport(out, len(stacked), sums.tokens, len(parts), sums.unseen)


def chunks_of(checkpoint: Checkpoint, text: str, most: int | None) -> list[Tensor]:
    """Return the first chunks of a text as token ids, 512 each. RecipeError if there is none."""
    import torch

    return [torch.tensor(chunk) for chunk in chunked(text_ids(checkpoint, text))[:most]]


def _hub(checkpoint: Checkpoint, name: str) -> str:
    return checkpoint.layout.atoms[name].hub


def column_order(checkpoint: Checkpoint, name: str) -> Tensor | None:
    """Return the order in which GGUF has the columns of a weight, None for the hub's."""
    role = checkpoint.layout.atoms[name].role
    ops = ops_to_gguf(role, checkpoint.config.sizes)
    tile = next((op for op in ops if isinstance(op, Tile) and op.axis == 1), None)
    return tile.order() if tile else None


def _write(
    out: Path, stacked: Mapping[str, tuple[Tensor, Tensor]], dataset: str, chunks: int
) -> None:
    """Write aside, make it durable, give it its name."""
    tensors: dict[str, Tensor] = {}
    for name, (sums, counts) in stacked.items():
        tensors |= {name + SUMS: sums, name + COUNTS: counts.reshape(-1, 1)}
    infos = [TensorInfo(name, "F32", tuple(value.shape)) for name, value in tensors.items()]
    pairs = [
        Kv(TYPE, "string", IMATRIX),
        Kv(DATASETS, "array[string]", [dataset]),
        Kv(CHUNKS, "uint32", chunks),
        Kv("imatrix.chunk_size", "uint32", CHUNK),
    ]
    shard = gguf_shard(out.name, pairs, infos)
    with writing(out, "writing it", NOTHING):
        make_folders(out.absolute().parent)
        with written_aside(out, partial_of(out)) as file:
            reserve(file, shard.nbytes)
            write_all(file, memoryview(shard.header), 0)
            for offset, value in zip(shard.offsets, tensors.values(), strict=True):
                write_all(file, memoryview(value.contiguous().numpy().tobytes()), offset)
