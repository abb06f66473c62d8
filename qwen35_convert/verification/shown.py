"""A verification that shows how far it has come: a bar of the bytes of weights on stderr."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from qwen35_convert.levels import STRUCTURE
from qwen35_convert.progress import bytes_bar
from qwen35_convert.verification.proof import Checks
from qwen35_convert.verification.verify import Report, verify


def verify_shown(
    artifact: Checkpoint, source: Checkpoint | None, checks: Checks, *, bar: bool
) -> Report:
    """Verify an artifact, with a bar of its weights' bytes on stderr on request."""
    if not bar or source is None or checks.effective.name == STRUCTURE:
        return verify(artifact, source, checks)
    todo = {name: _stored_bytes(artifact, atom) for name, atom in artifact.layout.atoms.items()}
    with bytes_bar(sum(todo.values()), "verify", shown=True) as advance:

        def progress(name: str) -> None:
            advance(todo.pop(name, 0))  # logits name layers, which are no bytes

        return verify(artifact, source, replace(checks, progress=progress))


def _stored_bytes(checkpoint: Checkpoint, atom: Atom) -> int:
    """Return the bytes of an atom's parts; of a stack of experts those of one."""
    nbytes = sum(checkpoint.infos()[part].nbytes for part in atom.parts)
    return nbytes if atom.whole is None else nbytes * prod(atom.shape) // prod(atom.whole)
