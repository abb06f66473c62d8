"""What a source is, from its headers, without loading what converts it."""

from __future__ import annotations

from qwen35_convert.inspection.inspect import Inspection, inspect_checkpoint
from qwen35_convert.inspection.serving import Given, ask
from qwen35_convert.source import Merge, Source, open_headers, repository_of


def inspect(
    source: Source,
    *,
    context: int | None = None,
    batch: int | None = None,
    memory: int | None = None,
) -> Inspection:
    """Return what a checkpoint is, from its headers; from the hub nothing else is fetched.

    context  with any of these three, `serving` says what serving takes: tokens of a sequence, 4096
             if they are left out
    batch    sequences at once, 1 if they are left out
    memory   bytes; `serving` then says also what fits into them
    """
    question = ask(context, batch, memory)
    return inspect_checkpoint(open_headers(source), _given(source), question)


def _given(source: Source) -> Given | None:
    """Return what engines are to be given; what an adapter makes of its model lies nowhere."""
    if isinstance(source, Merge):
        return None
    repository = repository_of(source)
    if repository is None:
        return Given(str(source))
    return Given(*repository, remote=True)
