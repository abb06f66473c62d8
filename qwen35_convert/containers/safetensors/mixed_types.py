"""Types that no exporter mixes, seen without a source: what is kept, and the scales of a scheme.

    kept    F16 or BF16, one of them in each part (text, vision, MTP), and F32 beside it
    scales  one type for all that the codes of a scheme have

A tensor in F16 among those in BF16 was cast, or has another's bits: each type holds numbers that
the other does not. The parts may come from different checkpoints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from formats.checkpoint import Checkpoint
from formats.family.names import optional_part
from qwen35_convert.failure import Failure

HALVES = ("BF16", "F16")
WORDS = {"": "text", "mtp": "MTP", "vision": "vision"}
Types = dict[str, dict[str, list[str]]]
"""Names of tensors by what they belong to, and by their type."""


def mixed_types(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield the first tensor of each type that is not the usual one of what it belongs to."""
    for group, by_type in _by_group(artifact).items():
        usual = max(by_type, key=lambda dtype: len(by_type[dtype]))
        for dtype in by_type.keys() - {usual}:
            first, *others = dict.fromkeys(by_type[dtype])
            more = f", and so are {len(others)} others" if others else ""
            yield Failure(first, f"is {dtype}, but most {group} are {usual}{more}")


def _by_group(artifact: Checkpoint) -> Types:
    infos, types = artifact.infos(), defaultdict[str, dict[str, list[str]]](dict)
    for name, atom in artifact.layout.atoms.items():
        part = WORDS[optional_part(name)]
        if not atom.quantized and atom.dtype in HALVES:
            types[f"{part} tensors"].setdefault(atom.dtype, []).append(atom.stored)
        for i, scale in enumerate(atom.parts[1:] if atom.quantized else ()):
            group = f"parts {i + 2} of {atom.scheme} in {part}"
            types[group].setdefault(infos[scale].dtype, []).append(scale)
    return types
