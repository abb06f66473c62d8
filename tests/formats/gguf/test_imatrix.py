"""imatrix files of both forms, written by hand or by the `gguf` package, and what is none."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.errors import FormatError
from formats.gguf.imatrix import read_imatrix

Entries = dict[str, tuple[np.ndarray, int]]
UP, DOWN = "blk.0.ffn_up.weight", "blk.0.ffn_down_exps.weight"
ENTRIES: Entries = {
    UP: (np.array([1.0, 2.5, 0.0], np.float32), 4),
    DOWN: (np.arange(6, dtype=np.float32), 4),
}


def older(entries: Entries, tail: bytes = b"") -> bytes:
    """Return an imatrix.dat as llama-imatrix wrote it: values are mean squares times the calls."""
    data = struct.pack("<i", len(entries))
    for name, (values, calls) in entries.items():
        data += (
            struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, values.size)
        )
        data += values.tobytes()
    return data + tail


def tail(chunks: int, text: bytes) -> bytes:
    return struct.pack("<ii", chunks, len(text)) + text


def as_gguf(path: Path, tensors: dict[str, np.ndarray], kind: str | None = "imatrix") -> Path:
    writer = gguf.GGUFWriter(path, "x")
    writer.kv_data[0].clear()
    if kind:
        writer.add_string("general.type", kind)
    writer.add_array("imatrix.datasets", ["wiki.txt", "code.txt"])
    writer.add_uint32("imatrix.chunk_count", 4)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain(file) -> dict[str, list[float]]:
    return {n: (s / c.reshape(-1, 1)).reshape(-1).tolist() for n, (s, c) in file.entries.items()}


@pytest.mark.parametrize("name", ["imatrix.dat", "imatrix.gguf", "imatrix"])
def test_both_forms_are_known_by_their_first_bytes(tmp_path, name):
    (tmp_path / name).write_bytes(older(ENTRIES, tail(7, b"wiki.txt")))
    file = read_imatrix(tmp_path / name)
    assert (file.datasets, file.chunks) == (("wiki.txt",), 7)
    assert plain(file) == {n: (v / c).tolist() for n, (v, c) in ENTRIES.items()}
    sums = {
        f"{UP}.in_sum2": np.ones((1, 3), np.float32),
        f"{UP}.counts": np.ones((1, 1), np.float32),
    }
    more = {f"{UP}.in_sum": np.ones((1, 3), np.float32)}
    file = read_imatrix(as_gguf(tmp_path / f"other-{name}", sums | more))
    assert (file.datasets, file.chunks) == (("wiki.txt", "code.txt"), 4)
    assert plain(file) == {UP: [1.0, 1.0, 1.0]}


def test_without_calls_the_values_are_means_already(tmp_path):
    (tmp_path / "x").write_bytes(older({UP: (np.array([3.0, 1.0], np.float32), 0)}))
    assert plain(read_imatrix(tmp_path / "x")) == {UP: [3.0, 1.0]}


@pytest.mark.parametrize("end", [b"", tail(0, b""), tail(3, b"")[:4], tail(3, b"wiki.txt")[:10]])
def test_the_oldest_files_end_after_their_entries(tmp_path, end):
    (tmp_path / "x").write_bytes(older(ENTRIES, end))
    assert set(read_imatrix(tmp_path / "x").entries) == set(ENTRIES)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "ends in the number of entries"),
        (b"not an imatrix at all, but long enough", "the number of entries is"),
        (struct.pack("<i", 0), "the number of entries is 0"),
        (struct.pack("<ii", 1, -5), "the name of entry 1 is -5"),
        (struct.pack("<ii", 1, 9999), "the name of entry 1 is 9999"),
        (older(ENTRIES)[:-1], f"ends in {DOWN}"),
        (older({UP: (np.ones(0, np.float32), 4)}), f"the number of values of {UP} is 0"),
        (older(ENTRIES)[:-20].replace(b"\x06\0\0\0", b"\xff\xff\xff\x7f"), "number of values of"),
    ],
)
def test_what_is_neither_is_refused(tmp_path, data, says):
    (tmp_path / "x.dat").write_bytes(data)
    with pytest.raises(
        FormatError, match=f"x.dat is not an imatrix: .*{says}.*expected llama.cpp's"
    ):
        read_imatrix(tmp_path / "x.dat")


@given(data=st.data(), cut=st.integers(0, 200))
def test_bytes_that_nobody_vouches_for_are_read_or_refused(tmp_path_factory, data, cut):
    path = tmp_path_factory.mktemp("x") / "x"
    good = bytearray(older(ENTRIES, tail(7, b"wiki.txt")))
    for _ in range(data.draw(st.integers(0, 3))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(good[: len(good) - cut] if cut < len(good) else good)
    try:
        read_imatrix(path)
    except FormatError:
        return


@pytest.mark.parametrize(
    ("tensors", "kind", "says"),
    [
        ({"a": np.ones(4, np.float32)}, "model", "general.type is 'model', expected 'imatrix'"),
        ({"a": np.ones(4, np.float32)}, None, "has no tensor NAME.in_sum2"),
        ({"a.in_sum2": np.ones(4, np.float32)}, "imatrix", "a.counts is missing, expected F32"),
        (
            {"a.in_sum2": np.ones(4, np.float16), "a.counts": np.ones(1, np.float32)},
            "imatrix",
            "a.in_sum2 is F16, expected F32",
        ),
    ],
)
def test_a_gguf_file_without_sums_is_refused(tmp_path, tensors, kind, says):
    with pytest.raises(FormatError, match=says):
        read_imatrix(as_gguf(tmp_path / "x.gguf", tensors, kind))


def test_a_file_that_is_not_there_or_a_folder_is_refused(tmp_path):
    with pytest.raises(FormatError, match="cannot be read: No such file"):
        read_imatrix(tmp_path / "none.gguf")
    with pytest.raises(FormatError, match="or in its older form"):
        read_imatrix(tmp_path)
