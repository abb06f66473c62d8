"""Tensors whose bytes come by ranges: the rows of the file, in any order, and every byte proven."""

from __future__ import annotations

import hashlib
from pathlib import Path
from threading import Event, Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from formats.safetensors.header import read_header
from qwen35_convert.errors import FetchError
from qwen35_convert.hub import remote_blocks
from qwen35_convert.hub.files import Entry
from qwen35_convert.hub.remote_blocks import RemoteFiles
from qwen35_convert.hub.remote_file import RemoteFile


class Source:
    """A file of random tensors behind a counting `read_range`, which may hold another file."""

    def __init__(self, folder: Path, block: int, shape: tuple[int, int] = (64, 33)) -> None:
        self.tensors = {f"t{i}": torch.randn(shape).bfloat16() for i in range(5)}
        path = folder / "m.safetensors"
        save_file(self.tensors, path)
        self.data, self.reads = path.read_bytes(), 0
        header = read_header(path)
        start = min(first for first, _ in header.ranges.values())
        sha256 = hashlib.sha256(self.data).hexdigest()
        entry = Entry(len(self.data), sha256, None)
        self.file = RemoteFile(path, header, entry, self.data[:start], self.read, block)
        where = dict.fromkeys(self.tensors, path.name)
        identity = {path.name: (entry.size, sha256)}
        self.files = RemoteFiles({path.name: self.file}, where, identity, {}, lambda: None)

    def read(self, start: int, stop: int) -> bytearray:
        self.reads += stop - start
        return bytearray(self.data[start:stop])

    def rows(self, name: str, index: slice | torch.Tensor) -> torch.Tensor:
        return self.files.load(name, self.file.read(name), index)


@settings(max_examples=50)
@given(
    block=st.integers(1, 5000),
    seed=st.integers(0, 99),
    index=st.one_of(
        st.builds(slice, st.integers(0, 64), st.integers(0, 64)),
        st.lists(st.integers(0, 63), max_size=20).map(torch.tensor).map(torch.Tensor.long),
    ),
)
def test_rows_are_those_of_the_file(tmp_path_factory, block, seed, index):
    source = Source(tmp_path_factory.mktemp("m"), block)
    for begin in (False, True):
        if begin:
            source.files.begin()
        name = f"t{seed % 5}"
        assert torch.equal(source.rows(name, index), source.tensors[name][index])
    source.files.finish()


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0], [3], [1, 4]])
def test_a_file_is_proven_in_any_order_and_with_gaps(tmp_path, order, monkeypatch):
    monkeypatch.setattr(remote_blocks, "HELD_BLOCKS", 2)
    monkeypatch.setattr(remote_blocks, "AHEAD", 0)
    source = Source(tmp_path, block=500)
    source.files.begin()
    for number in order:
        source.rows(f"t{number}", slice(0, 64))
        assert len(source.files._held) <= 2
    source.files.finish()
    assert source.files.proven(source.tensors)


def test_what_nobody_reads_is_neither_read_nor_claimed(tmp_path):
    source = Source(tmp_path, block=500)
    source.files.begin()
    source.files.finish()
    assert source.reads == 0
    described = source.files.describe([source.file.path.name], [])
    assert described == {"m.safetensors": {"size": len(source.data), "sha256": None}}


def test_another_file_behind_the_same_name_is_seen_at_its_end(tmp_path):
    source = Source(tmp_path, block=500)
    source.data = source.data[:-1] + bytes([source.data[-1] ^ 1])
    source.files.begin()
    source.rows("t0", slice(0, 64))
    with pytest.raises(FetchError, match="sha256"):
        source.files.finish()
    assert not source.files.proven(["t0"])


def test_another_header_than_the_one_that_was_planned_with_is_seen(tmp_path):
    source = Source(tmp_path, block=500)
    source.file._head = source.file._head[:-1] + b"!"
    source.files.begin()
    with pytest.raises(FetchError, match="another header"):
        source.rows("t0", slice(0, 64))


def test_a_block_that_is_not_the_one_of_before_is_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_blocks, "HELD_BLOCKS", 1)
    source = Source(tmp_path, block=500)
    source.files.begin()
    source.rows("t0", slice(0, 64))
    source.files.finish()
    right = source.data
    source.data = bytes(len(right))
    with pytest.raises(FetchError, match="other bytes"):
        source.rows("t0", slice(0, 64))
    source.data = right
    assert torch.equal(source.rows("t0", slice(0, 64)), source.tensors["t0"])


def test_a_block_that_two_threads_need_is_read_once(tmp_path):
    source = Source(tmp_path, block=1 << 20)
    source.files.begin()
    go, read = Event(), source.file.read_range

    def slow(start: int, stop: int) -> bytearray:
        go.wait(10)
        return read(start, stop)

    source.file.read_range = slow
    threads = [Thread(target=source.rows, args=(f"t{i}", slice(0, 9))) for i in range(4)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert source.reads == len(source.data)
