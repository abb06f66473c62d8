"""How a conversion begins to write: anew, or where an interrupted one of its own left off."""

from __future__ import annotations

from qwen35_convert.errors import OutputError
from qwen35_convert.write.journal import Journal
from qwen35_convert.write.sink import JOURNAL, FolderSink


def begin(sink: FolderSink, digest: str, *, overwrite: bool) -> Journal:
    """Return the journal of this conversion, resumed if it is its own; every file is reserved.

    OutputError if OUT has been written meanwhile, or holds an unfinished conversion of another kind
    that is not to be overwritten.
    """
    _check_still_free(sink, overwrite=overwrite)
    journal = Journal(sink.work / JOURNAL, digest, sink.left)
    if journal.resume():
        if not sink.is_whole():
            journal.forget()
    else:
        _check_abandoned(sink, overwrite=overwrite)
        sink.clear()
    sink.create()
    journal.start()
    return journal


def _check_still_free(sink: FolderSink, *, overwrite: bool) -> None:
    """Refuse an OUT that another conversion finished after this one had looked."""
    entry = sink.entry
    if not overwrite and (entry.is_file() or (entry.is_dir() and any(entry.iterdir()))):
        sink.discard()
        raise OutputError(f"{entry} has just been written by another conversion")


def _check_abandoned(sink: FolderSink, *, overwrite: bool) -> None:
    if (sink.work / JOURNAL).exists() and not overwrite:
        raise OutputError(
            f"{sink.out}: an unfinished conversion of another source or recipe is in {sink.work}",
            fix="finish it with its own recipe, or add --overwrite to discard it",
        )
