"""Output that is a file, or a few beside each other: a GGUF, its parts, its mmproj, its receipt.

They are built in a hidden folder like a folder of safetensors. `commit` moves them out one by one,
OUT itself last; a list of what is to be moved is made durable first, so that a crash between two
moves is finished by the next run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from formats.gguf.file import begins_as_gguf
from formats.gguf.imatrix import IMATRIX, is_imatrix
from qwen35_convert.durable import replace_file, sync_folder, writing
from qwen35_convert.errors import OutputError
from qwen35_convert.write.journal import Journal
from qwen35_convert.write.out import check_link, check_name, check_parent, partial_of
from qwen35_convert.write.receipt import receipt_name
from qwen35_convert.write.sink import JOURNAL, LOCK, FolderSink

if TYPE_CHECKING:
    from qwen35_convert.planning.plan import Shard

MODEL = "model"
MOVES, NEW_MOVES = "moves", "moves.new"


def check_out_files(
    out: Path,
    names: Sequence[str],
    source: Sequence[Path],
    *,
    overwrite: bool,
    kind: str = MODEL,
) -> None:
    """Refuse output files that would destroy something: the source, or unrelated files.

    kind  what `general.type` says of the files that may be replaced
    """
    origin = {path.resolve() for path in source}
    for path in (out, *(out.with_name(name) for name in names)):
        check_name(path)
        check_parent(path)
        if path.resolve() in origin:
            raise OutputError(f"{path} is a file of the source", fix="choose another OUT")
        check_link(path)
        if not path.exists():
            continue
        if not path.is_file():
            raise OutputError(str(path), "is not a file", "a GGUF file or nothing")
        if not overwrite:
            raise OutputError(f"{path} exists", fix="choose another OUT, or add --overwrite")
        _check_kind(path, kind)


def _check_kind(path: Path, kind: str) -> None:
    """Refuse to replace what is no GGUF file, or one of another use."""
    wrong = None if begins_as_gguf(path) else "is not a GGUF file"
    if wrong is None and (kind == IMATRIX) != is_imatrix(path):
        wrong = "is a model" if kind == IMATRIX else "is an importance matrix"
    if wrong:
        fix = "choose another OUT"
        raise OutputError(f"{path} {wrong}, so --overwrite does not replace it", fix=fix)


def finish_moves(out: Path, first: Path, digest: str) -> bool:
    """Finish renaming the files after a crash; `first` is renamed last.

    Return whether they belong to the conversion of this digest, which is then complete. OutputError
    if another process is doing it.
    """
    work = partial_of(out)
    moving = (work / MOVES).is_file()
    if not moving and (not first.exists() or not work.is_dir() or (work / JOURNAL).exists()):
        return False
    sink = FileSink(out, ())
    sink.open()
    try:
        same = Journal(work / JOURNAL, digest).resume()
        with writing(out, "giving it its name", sink.left):
            if (work / MOVES).is_file():
                _move(work, out)
            else:  # all files are moved, only the folder was left
                shutil.rmtree(work)
    finally:
        sink.close()
    return same


class FileSink(FolderSink):
    """GGUF files under construction."""

    def __init__(self, out: Path, shards: Sequence[Shard]) -> None:
        super().__init__(out, shards)
        self.receipt = receipt_name(out)

    @property
    def entry(self) -> Path:
        """Return the first of the files; it leads to the others."""
        return self.out.with_name(self._shards[0].name)

    @property
    def artifact(self) -> Path:
        """Return the first of the files, where it is built."""
        return self.work / self._shards[0].name

    def commit(self) -> None:
        """Make everything durable and give every file its final name."""
        self.sync()
        first = self.artifact.name
        names = sorted(self.artifact_files(), key=lambda name: name == first)
        with writing(self.out, "giving it its name", self.left):
            replace_file(self.work / MOVES, json.dumps(names).encode(), self.work / NEW_MOVES)
            _move(self.work, self.out)
        self.close()


def _move(work: Path, out: Path) -> None:
    """Move the listed files that are still there; the last is the one that others open."""
    for name in json.loads((work / MOVES).read_bytes()):
        if (work / name).exists():
            (work / name).rename(out.with_name(name))
    sync_folder(out.parent)
    (work / JOURNAL).unlink(missing_ok=True)  # first: its files are gone
    (work / MOVES).unlink()
    (work / LOCK).unlink(missing_ok=True)
    shutil.rmtree(work, ignore_errors=True)
    sync_folder(out.parent)
