"""In which type an artifact may have what it keeps: the source's, or a wider one.

F32 holds every BF16 and every F16 number, so nothing is lost. F16 does not hold BF16's range, nor
BF16 the digits of F16: a file that says either was cast, or has another's bits.
"""

from __future__ import annotations

from collections.abc import Iterator

from formats.checkpoint import Checkpoint
from qwen35_convert.containers.registry import container_of
from qwen35_convert.failure import Failure

HOLDS = {"F32": ("BF16", "F16")}


def type_failures(artifact: Checkpoint, source: Checkpoint) -> Iterator[Failure]:
    """Yield what is kept in a type that does not hold the source's numbers."""
    for name, atom in artifact.layout.atoms.items():
        problem = recast(artifact, source, name) if name in source.layout.atoms else None
        if problem:
            yield Failure(atom.stored, problem)


def recast(artifact: Checkpoint, source: Checkpoint, name: str) -> str | None:
    """Say in which type an atom is kept that is not the source's; None if it holds the numbers.

    None too where a container has types of its own: the census knows which.
    """
    mine, origin = artifact.layout.atoms[name], source.layout.atoms[name]
    own = container_of(artifact).widens or container_of(source).widens or mine.quantized
    if own or mine.dtype == origin.dtype or origin.dtype in HOLDS.get(mine.dtype, ()):
        return None
    return f"is {mine.dtype}, but the source has {origin.dtype}"
