"""The values of a vision file: all finite, and those of the source's vision tower if it has one.

Each tensor of the source is transformed as llama.cpp wants it and compared with what the file
holds: bit for bit after the cast, in blocks as any other weight of their type is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.layout import Atom
from formats.family.roles import VISION
from formats.gguf.file import GgufFile
from formats.gguf.vision import VisionTensor, vision_tensors
from formats.safetensors.file import torch_dtype
from quant.ggml.scheme import BLOCKS, Ggml
from quant.measure import same_bits
from quant.opening import open_value
from qwen35_convert.failure import Failure

if TYPE_CHECKING:
    from torch import Tensor

DIFFERS = "differs from the source's vision tower"
UNPROVEN = "no bound is known of this type, it is unproven"
Origin = tuple[Atom, VisionTensor]


def value_failures(path: Path, source: Checkpoint | None) -> Iterator[Failure]:
    """Yield tensors whose values are not finite, or not the source's.

    What the header shows to be wrong (`mmproj_check`) is passed over.
    """
    try:
        file = GgufFile(path)
    except FormatError:
        return
    atoms = source.layout.atoms.values() if source else ()
    towers = [atom for atom in atoms if atom.role == VISION]
    origins = {t.gguf: (atom, t) for atom in towers for t in vision_tensors(atom.hub)}
    for name in file.infos:
        yield from (Failure(name, p) for p in _problems(file, name, source, origins.get(name)))
        file.release()


def _problems(
    file: GgufFile, name: str, source: Checkpoint | None, origin: Origin | None
) -> Iterator[str]:
    stored = {BLOCKS: file.read(name)}
    scheme = Ggml(file.infos[name].dtype)
    defects = scheme.defects(stored).get(BLOCKS)
    if defects:
        yield f"has {defects[1]} {defects[0]}"
    elif source is not None and origin is not None:
        atom, target = origin
        expected = open_value(source, atom, target.ops).all()
        if tuple(expected.shape) == file.infos[name].shape:
            yield from _differences(scheme, stored, expected)


def _differences(scheme: Ggml, stored: dict[str, Tensor], expected: Tensor) -> Iterator[str]:
    if scheme.plain:
        if not same_bits(stored[BLOCKS], expected.to(torch_dtype(scheme.type))):
            yield DIFFERS
        return
    for fault in scheme.judge(scheme.compare(expected, stored)):
        yield f"{DIFFERS}: {fault}"
    if not scheme.bounded:
        yield f"is {scheme.name}: {UNPROVEN}"
