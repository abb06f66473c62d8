"""The output, written aside: every size and offset is fixed before the first byte.

Everything goes to a hidden folder beside OUT; `commit` makes it durable (fsync of each file and of
the folders) and renames it, so OUT is complete or it is not there. The folder is locked while a
conversion runs, keeps the journal, and stays after an interruption for the next run to resume.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from formats.errors import NOTHING, FormatError
from qwen35_convert.durable import (
    make_folders,
    replace_folder,
    reserve,
    rewrite,
    sync_data,
    sync_folder,
    write_all,
    write_file,
    writing,
)
from qwen35_convert.errors import OutputError
from qwen35_convert.write.failed import failed_of
from qwen35_convert.write.out import partial_of
from qwen35_convert.write.receipt import RECEIPT

if TYPE_CHECKING:
    from qwen35_convert.planning.plan import Shard

LOCK, JOURNAL, NEW_JOURNAL = "lock", "journal", "journal.new"
SEEN = "calibration"  # what calibration saw, until it is in the receipt
OWN = (LOCK, JOURNAL, NEW_JOURNAL, SEEN)


def read_mark(out: Path) -> str:
    """Return the token in the lock file of OUT, empty if there is no such file here."""
    lock = partial_of(out) / LOCK
    try:
        return lock.read_text(errors="replace")
    except OSError:
        return ""


class FolderSink:
    """A folder of safetensors under construction."""

    def __init__(self, out: Path, shards: Sequence[Shard]) -> None:
        self.out, self.work = out, partial_of(out)
        self.receipt = RECEIPT
        self._shards = shards
        self._places = {
            info.name: (shard.name, offset)
            for shard in shards
            for info, offset in zip(shard.infos, shard.offsets, strict=True)
        }
        self._files: dict[str, int] = {}
        self._added: list[str] = []
        self._made: list[Path] = []
        self._lock = -1
        self._lost: OutputError | None = None

    @property
    def entry(self) -> Path:
        """The path that others open; it exists only once the artifact is complete."""
        return self.out

    @property
    def artifact(self) -> Path:
        """The path to open once it is written."""
        return self.work

    @property
    def left(self) -> str:
        """What is on the disk after a failure."""
        return f"finished work is kept in {self.work}; run the same command again to resume"

    def open(self) -> None:
        """Create or reopen the folder, lock it. OutputError if another conversion holds it."""
        try:
            self._made += make_folders(self.out.absolute().parent)
            self.work.mkdir(exist_ok=True)
            self._lock = os.open(self.work / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise OutputError(f"{self.out} is being written by another conversion") from None
        except OSError as error:
            self.close()
            raise OutputError(f"{self.out} cannot be written: {error.strerror}") from None
        self._check_lock()

    def _check_lock(self) -> None:
        """Refuse the lock of a folder that another conversion has just renamed to OUT."""
        mine, path = os.fstat(self._lock), self.work / LOCK
        if not path.exists() or path.stat().st_ino != mine.st_ino:
            self.close()
            raise OutputError(f"{self.out} has just been written by another conversion")

    def mark(self, token: str) -> None:
        """Put a token into the lock file, by which others recognise this conversion's folder."""
        with writing(self.out, "writing the lock", left=self.left):
            rewrite(self._lock, token.encode())

    def attach(self) -> None:
        """Open the files that another process has reserved and locked."""
        with writing(self.out, "opening its files", left=self.left):
            for shard in self._shards:
                self._files[shard.name] = os.open(self.work / shard.name, os.O_RDWR)

    def clear(self) -> None:
        """Remove what an abandoned conversion left."""
        self._clear({LOCK})

    def _clear(self, kept: Collection[str]) -> None:
        with writing(self.out, "removing what an earlier run left", left=self.left):
            for path in self.work.iterdir():
                if path.name in kept:
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()

    def is_whole(self) -> bool:
        """Whether every file that the journal covers exists at its full size."""
        paths = {shard: self.work / shard.name for shard in self._shards}
        return all(p.is_file() and p.stat().st_size == s.nbytes for s, p in paths.items())

    def create(self) -> None:
        """Reserve every file at its full size with its header. Refuses when the disk is short."""
        self._clear({*OWN, *(shard.name for shard in self._shards)})  # such as a torn receipt
        with writing(self.out, "reserving its files", left=self.left):
            self._create()

    def _create(self) -> None:
        needed = sum(shard.nbytes for shard in self._shards)
        free = shutil.disk_usage(self.work).free
        paths = (self.work / shard.name for shard in self._shards)
        present = sum(path.stat().st_blocks * 512 for path in paths if path.is_file())
        if needed > free + present:
            left = self.left if present else NOTHING
            if not present:
                self.discard()
            raise OutputError(
                str(self.out),
                f"has {free + present:,} bytes free on its disk",
                f"{needed:,} bytes",
                "free some space, or choose an OUT on another disk",
                left=left,
            )
        for shard in self._shards:
            file = os.open(self.work / shard.name, os.O_RDWR | os.O_CREAT, 0o666)
            self._files[shard.name] = file
            reserve(file, shard.nbytes)
            write_all(file, memoryview(shard.header), 0)
        sync_folder(self.work)

    def write(self, name: str, offset: int, data: memoryview) -> None:
        """Put `data` at byte `offset` of tensor `name`; safe from any thread."""
        shard, start = self._places[name]
        try:
            write_all(self._files[shard], data, start + offset)
        except OSError as error:
            if error.errno == errno.EFAULT:  # these bytes are a view on a file of the source
                raise FormatError(f"the source of {name} shrank, or its disk failed") from None
            raise OutputError(
                f"{self.out}: writing {shard} failed: {error.strerror}", left=self.left
            ) from None

    def sync(self) -> None:
        """Make what was written durable.

        After a failure it always fails: the kernel reports lost pages once, then calls them clean.
        """
        try:
            with writing(self.out, "making it durable", left=self.left):
                for file in self._files.values():
                    sync_data(file)
        except OutputError as error:
            self._lost = error
        if self._lost:
            raise self._lost

    def add_file(self, name: str, content: bytes) -> None:
        """Write a whole side file durably."""
        path = self.work / name
        with writing(self.out, f"writing {name}", left=self.left):
            path.parent.mkdir(exist_ok=True)
            write_file(path, content)
            if path.parent != self.work:
                sync_folder(path.parent)
        self._added.append(name)

    def artifact_files(self) -> dict[str, Path]:
        """Return every file of the artifact that this run has written, or found finished, by name.

        Other files in the folder do not count: a killed run may have left its receipt.
        """
        return {name: self.work / name for name in (*self._files, *self._added)}

    def commit(self) -> None:
        """Make everything durable and give it its final name."""
        self._rename(self.out)

    def reject(self) -> Path:
        """Make everything durable as OUT.failed; return where that is. OUT stays what it was."""
        failed = failed_of(self.out)
        self._rename(failed)
        return failed

    def _rename(self, path: Path) -> None:
        """Make everything durable and give the folder this name."""
        self.sync()
        with writing(path, "giving it its name", left=self.left):
            for file in (JOURNAL, NEW_JOURNAL, SEEN):
                (self.work / file).unlink(missing_ok=True)
            sync_folder(self.work)
            replace_folder(self.work, path)
            # last: without it another conversion would take the folder for an abandoned one
            (path / LOCK).unlink()
        self.close()

    def discard(self) -> None:
        """Remove everything that was written."""
        self.close()
        shutil.rmtree(self.work, ignore_errors=True)
        with suppress(OSError):  # another conversion may be there
            for folder in reversed(self._made):
                folder.rmdir()

    def close(self) -> None:
        """Close all files; what was written stays for a later run."""
        for file in (*self._files.values(), *([self._lock] if self._lock >= 0 else [])):
            os.close(file)
        self._files, self._lock = {}, -1
