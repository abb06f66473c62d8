"""Changes of the disk that survive a crash: bytes first, then names, then the folder of the names.

    a whole file   written aside -> fsync -> rename -> fsync of its folder
    a large file   reserved at its full size -> written in place -> fdatasync
    a folder       fsync of its files -> exchanged with the old one, or renamed

Every call that changes the disk is made as `os.X` or by `Path`, so that a test can let it fail.

Trap: a file that was renamed but not synced may be empty after a power loss; so is its name lost
when only the file was synced and not the folder.
Source: rename(2), renameat2(2), fsync(2), posix_fallocate(3).
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qwen35_convert.errors import OutputError

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
HEAD = 64  # bytes of a file that tell its kind
ELSEWHERE = "name another file, or remove this one"
CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
CANNOT_RESERVE = (errno.EINVAL, errno.EOPNOTSUPP)


@contextmanager
def writing(out: Path, step: str, left: str) -> Iterator[None]:
    """Turn an OSError into an OutputError that names the step."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{out}: {step} failed: {error.strerror}", left=left) from None


def write_all(file: int, data: memoryview, offset: int) -> None:
    """Write `data` at a byte offset; a short write is continued."""
    while data.nbytes:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def reserve(file: int, nbytes: int) -> None:
    """Set the size and allocate the blocks, so that a full disk is an error before the work.

    Where the system cannot allocate, only the size is set.
    """
    os.ftruncate(file, nbytes)
    allocate = getattr(os, "posix_fallocate", None)  # macOS has none
    if allocate is None:
        return
    try:
        allocate(file, 0, nbytes)
    except OSError as error:
        if error.errno not in CANNOT_RESERVE:
            raise


def sync_data(file: int) -> None:
    """Make the bytes of a file durable."""
    getattr(os, "fdatasync", os.fsync)(file)  # macOS has no fdatasync


def rewrite(file: int, content: bytes) -> None:
    """Replace the content of an open file durably, but not in one step."""
    os.ftruncate(file, 0)
    write_all(file, memoryview(content), 0)
    os.fsync(file)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def make_folders(path: Path) -> list[Path]:
    """Make a folder and those above it, durably; return the new ones, the outermost first."""
    missing = [path, *path.parents]
    new = [folder for folder in reversed(missing) if not folder.exists()]
    for folder in new:
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
    return new


@contextmanager
def _synced(path: Path, flags: int) -> Iterator[int]:
    """Yield the file, open to write; what was written is durable afterwards."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | flags, 0o666)
    try:
        yield file
        os.fsync(file)
    finally:
        os.close(file)


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file durably, its name not yet."""
    with _synced(path, os.O_TRUNC) as file:
        write_all(file, memoryview(content), 0)


def append_to_file(path: Path, content: bytes) -> None:
    """Add bytes durably to the end of a file."""
    with _synced(path, 0) as file:
        write_all(file, memoryview(content), os.fstat(file).st_size)


@contextmanager
def written_aside(path: Path, aside: Path) -> Iterator[int]:
    """Yield a file at `aside` to be written; afterwards it is at `path`, whole and durable.

    After a failure `path` is what it was, and `aside` is gone.
    """
    try:
        with _synced(aside, os.O_TRUNC) as file:
            yield file
        aside.rename(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def replace_file(path: Path, content: bytes, aside: Path) -> None:
    """Give `path` this content durably: at every moment there is the old content or the new."""
    with written_aside(path, aside) as file:
        write_all(file, memoryview(content), 0)


def check_place(path: Path, begins: bytes | tuple[bytes, ...]) -> None:
    """Refuse a file that could not be written, or that would replace another. OutputError.

    begins  how files of its kind begin: nothing else is replaced, but what is empty
    """
    check_replaced(path, begins)
    with writing(path, "looking at its folder", "nothing was written"):
        nearest = nearest_folder(path)
        if path.exists() and not path.is_file():
            raise OutputError(str(path), "is a folder" if path.is_dir() else "is not a file")
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise OutputError(str(path), f"cannot be written: {nearest} is no folder to write in")


def check_replaced(path: Path, begins: bytes | tuple[bytes, ...]) -> None:
    """Refuse to replace a file that begins otherwise. OutputError."""
    with writing(path, "looking at it", "nothing was written"):
        head = _head_of(path) if path.is_file() else b""
    if head and not head.startswith(begins):
        raise OutputError(f"{path} holds something else, which is not replaced", fix=ELSEWHERE)


def _head_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(HEAD)


def nearest_folder(path: Path) -> Path:
    """Return the first of the folders above a path that is there."""
    return next(folder for folder in path.absolute().parents if folder.exists())


def save_file(path: Path, content: bytes) -> None:
    """Write a whole file under its name durably, and the folders it goes into. OutputError."""
    with writing(path, "writing it", "what was there before"):
        make_folders(path.absolute().parent)
        replace_file(path, content, path.with_name(f".{path.name}.{os.getpid()}"))


def replace_folder(new: Path, path: Path) -> None:
    """Give the folder `new` the name `path`: at every moment there is the old `path` or the new."""
    if not path.is_dir() or not any(path.iterdir()):
        new.rename(path)
    elif not exchange(new, path):
        _replace_in_two_steps(new, path)
    sync_folder(path.parent)
    shutil.rmtree(new, ignore_errors=True)  # what was there before


def _replace_in_two_steps(new: Path, path: Path) -> None:
    """Swap two folders where the file system cannot exchange them: for a moment `path` is gone."""
    old = path.with_name(f".{path.name}.qwen35-old")
    shutil.rmtree(old, ignore_errors=True)
    path.rename(old)
    try:
        new.rename(path)
    except OSError:
        old.rename(path)
        raise
    old.rename(new)


def exchange(a: Path, b: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot. OSError."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(a), AT_FDCWD, os.fsencode(b), RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in CANNOT_EXCHANGE:
        return False
    raise OSError(error, os.strerror(error), str(b))
