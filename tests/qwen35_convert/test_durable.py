"""Changes of the disk: whole or not at all, whatever call fails."""

from __future__ import annotations

import errno
import os

import pytest

from qwen35_convert import durable
from qwen35_convert.durable import append_to_file, exchange, replace_file, reserve, write_all


def failing(number: int):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def test_two_names_are_swapped_in_one_step_or_not_at_all(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    with pytest.raises(OSError, match="No such file"):
        exchange(a, b)
    b.write_text("b")
    if exchange(a, b):
        assert a.read_text() == "b"
        assert b.is_dir()


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename"])
def test_a_file_that_cannot_be_replaced_is_what_it_was(tmp_path, monkeypatch, call):
    path, aside = tmp_path / "file", tmp_path / "aside"
    replace_file(path, b"old", aside)
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing(errno.EIO))
        with pytest.raises(OSError, match="Input/output error"):
            replace_file(path, b"new", aside)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"
    replace_file(path, b"new", aside)
    append_to_file(path, b"er")
    assert path.read_bytes() == b"newer"


def test_a_short_write_is_continued(tmp_path, monkeypatch):
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: whole(file, data[:3], at))
    with (tmp_path / "file").open("wb") as file:
        write_all(file.fileno(), memoryview(b"0123456789"), 2)
    assert (tmp_path / "file").read_bytes() == b"\0\0" + b"0123456789"


@pytest.mark.parametrize("number", durable.CANNOT_RESERVE)
def test_where_blocks_cannot_be_reserved_the_size_is_set(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "posix_fallocate", failing(number))
    with (tmp_path / "file").open("wb") as file:
        reserve(file.fileno(), 100)
    assert (tmp_path / "file").stat().st_size == 100
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    with (tmp_path / "other").open("wb") as file, pytest.raises(OSError, match="No space"):
        reserve(file.fileno(), 100)
