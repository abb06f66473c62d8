"""Whether all tensors of a folder stand in one namespace, under the names that engines look for.

A reader of checkpoints strips whatever precedes a name. Engines strip one prefix, and drop or
refuse a tensor that has another one.
"""

from __future__ import annotations

from collections.abc import Iterator

from formats.checkpoint import Checkpoint
from formats.family.names import TOP_LEVEL, normalise, part_of, prefixes
from qwen35_convert.failure import Failure

OUTER = "language_model."


def namespace_failures(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield every part of a weight that is named otherwise than its kin.

    The head and MTP stand at the top, unless the trunk itself is inside `language_model`.
    """
    stored = [part for atom in artifact.layout.atoms.values() for part in atom.parts]
    by_part = prefixes(stored)
    if not by_part.get("trunk", "").startswith(OUTER):
        by_part |= {part: "" for part in TOP_LEVEL if part in by_part}
    for name in dict.fromkeys(stored):
        hub = normalise(name)
        expected = by_part.get(part_of(hub))
        if expected is not None and name != expected + hub:
            yield Failure(
                name, f"is in another namespace than the other tensors, expected {expected}{hub}"
            )
