"""The vision file beside a GGUF against the source's vision tower, tensor by tensor.

Each tensor of the source is transformed as llama.cpp wants it and compared with what the file
holds: bit for bit after the cast, in blocks within what their type allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from formats.gguf.checkpoint import whole_path
from formats.gguf.file import GgufFile
from formats.gguf.vision import VisionTensor, vision_tensors
from formats.safetensors.file import TORCH_NAMES, torch_dtype
from quant.measure import same_bits
from quant.stored import open_value
from qwen35_convert.containers.gguf.mmproj import VISION, mmproj_name
from qwen35_convert.failure import Failure

if TYPE_CHECKING:
    from torch import Tensor


def mmproj_beside(artifact: Checkpoint) -> Path | None:
    """Return the vision file that lies beside a GGUF artifact, if there is one."""
    path = artifact.folder / mmproj_name(whole_path(artifact).stem)
    return path if path.is_file() else None


def mmproj_failures(path: Path, source: Checkpoint | None) -> Iterator[Failure]:
    """Yield what is wrong with a vision file; FormatError if it cannot be opened.

    Without a source, or one without vision, only the file itself is read.
    """
    file = GgufFile(path)
    towers = (
        [atom for atom in source.layout.atoms.values() if atom.role == VISION] if source else []
    )
    wanted = {target.gguf: (atom, target) for atom in towers for target in vision_tensors(atom.hub)}
    for name in sorted(set(file.infos) ^ set(wanted)) if wanted else ():
        where = "the source" if name in wanted else "the vision file"
        yield Failure(name, f"is only in {where}")
    for name, (atom, target) in wanted.items():
        if name in file.infos:
            assert source is not None, "tensors are wanted of a source"
            yield from _compare(file, name, source, atom, target)


def _compare(
    file: GgufFile, name: str, source: Checkpoint, atom: Atom, target: VisionTensor
) -> Iterator[Failure]:
    expected = open_value(source, atom, target.ops).all()
    info = file.infos[name]
    if info.shape != tuple(expected.shape):
        yield Failure(name, f"has shape {list(info.shape)}, expected {list(expected.shape)}")
    elif not _agree(file.read(name), info.dtype, expected):
        yield Failure(name, "differs from the source's vision tower")


def _agree(stored: Tensor, dtype: str, expected: Tensor) -> bool:
    from quant.ggml import codec

    if dtype in TORCH_NAMES:
        return same_bits(stored, expected.to(torch_dtype(dtype)))
    columns = expected.shape[-1]
    rows = expected.reshape(-1, columns)
    decoded = codec.decode(dtype, stored.reshape(rows.shape[0], -1), columns)
    return codec.outside(dtype, rows, decoded) == 0
