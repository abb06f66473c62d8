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

    context  tokens of each sequence, 4096 if only batch or memory is given; with any of the three
             `serving` has the memory that serving takes
    batch    sequences at once, 1 if only context or memory is given
    memory   bytes of the device; `serving` then also has what fits
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
