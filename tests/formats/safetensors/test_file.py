"""One safetensors file: read as the library reads it, hostile headers refused, pages given back."""

from __future__ import annotations

import json
import struct
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from formats.errors import FormatError
from formats.safetensors.file import TORCH_NAMES, SafetensorsFile
from formats.safetensors.header import MAX_HEADER, build_header, read_header
from formats.tensor import DTYPE_BYTES, TensorInfo

SMAPS = Path("/proc/self/smaps")
needs_smaps = pytest.mark.skipif(not SMAPS.exists(), reason="needs Linux's /proc/self/smaps")
ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write_raw(path: Path, header: bytes | dict[str, Any], data: bytes = b"") -> Path:
    """Write a file by hand: its length word, this header, these bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def tensor_of(dtype: str, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return random bytes as a tensor."""
    generator = torch.Generator().manual_seed(seed)
    count = TensorInfo("", dtype, shape).nbytes
    limit = 2 if dtype == "BOOL" else 256
    data = torch.randint(0, limit, (count,), generator=generator, dtype=torch.uint8)
    return data.view(getattr(torch, TORCH_NAMES[dtype])).reshape(shape)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_ours(path: Path, tensors: dict[str, tuple[str, torch.Tensor]]) -> Path:
    infos = [TensorInfo(n, dtype, tuple(t.shape)) for n, (dtype, t) in tensors.items()]
    head, offsets = build_header(infos, {"format": "pt"})
    assert all(offset >= len(head) for offset in offsets)
    path.write_bytes(head + b"".join(bytes_of(t) for _, t in tensors.values()))
    return path


def test_every_dtype_the_library_writes_is_read_bit_for_bit(tmp_path):
    tensors = {dtype: tensor_of(dtype, (3, 5), i) for i, dtype in enumerate(TORCH_NAMES)}
    tensors |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    ours = SafetensorsFile(tmp_path / "x.safetensors")
    assert ours.header.metadata == {"format": "pt"}
    assert ours.header.infos.keys() == tensors.keys()
    for name, expected in tensors.items():
        read = ours.read(name)
        assert (read.dtype, read.shape) == (expected.dtype, expected.shape), name
        assert bytes_of(read) == bytes_of(expected), name


def test_every_dtype_we_write_is_read_by_the_library(tmp_path):
    tensors = {d: (d, tensor_of(d, (3, 5), i)) for i, d in enumerate(TORCH_NAMES)}
    path = write_ours(tmp_path / "x.safetensors", tensors)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert set(opened.keys()) == set(tensors)
        for name, (_, expected) in tensors.items():
            read = opened.get_tensor(name)
            assert (read.dtype, read.shape) == (expected.dtype, expected.shape), name
            assert bytes_of(read) == bytes_of(expected), name


def test_the_table_of_dtypes_agrees_with_torch():
    assert TORCH_NAMES.keys() == DTYPE_BYTES.keys()
    for dtype, name in TORCH_NAMES.items():
        assert getattr(torch, name).itemsize == DTYPE_BYTES[dtype]


tensors_to_write = st.lists(
    st.tuples(
        st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=9),
        st.sampled_from(sorted(DTYPE_BYTES)),
        st.lists(st.integers(0, 5), max_size=4).map(tuple),
    ),
    unique_by=lambda entry: entry[0],
    max_size=8,
)


@settings(max_examples=60)
@given(entries=tensors_to_write, seed=st.integers(0, 2**16), ordered=st.booleans())
def test_what_is_written_is_read_back_in_any_order_of_types(entries, seed, ordered):
    entries = [entry for entry in entries if entry[0] != "__metadata__"]
    if ordered:
        entries.sort(key=lambda entry: -DTYPE_BYTES[entry[1]])
    tensors = {n: (d, tensor_of(d, s, seed + i)) for i, (n, d, s) in enumerate(entries)}
    with tempfile.TemporaryDirectory() as folder:
        path = write_ours(Path(folder) / "x.safetensors", tensors)
        ours = SafetensorsFile(path)
        for name, (dtype, expected) in tensors.items():
            assert ours.header.infos[name] == TensorInfo(name, dtype, tuple(expected.shape))
            assert bytes_of(ours.read(name)) == bytes_of(expected)
        with safe_open(path, "pt") as opened:
            assert set(opened.keys()) == set(tensors)


@given(tensors_to_write)
def test_wider_types_first_are_all_aligned(entries):
    entries.sort(key=lambda entry: -DTYPE_BYTES[entry[1]])
    infos = [TensorInfo(*entry) for entry in entries]
    head, offsets = build_header(infos, {})
    assert len(head) % 8 == 0
    for info, offset in zip(infos, offsets, strict=True):
        assert offset % DTYPE_BYTES[info.dtype] == 0


@pytest.mark.parametrize("lead", [1, 2, 3, 5, 6, 7])
@pytest.mark.parametrize("dtype", ["F64", "F32", "BF16", "F8_E4M3"])
def test_an_odd_offset_is_read_too(tmp_path, dtype, lead):
    value = tensor_of(dtype, (7,), lead)
    stop = lead + 7 * DTYPE_BYTES[dtype]
    header = {
        "lead": {"dtype": "U8", "shape": [lead], "data_offsets": [0, lead]},
        "odd": {"dtype": dtype, "shape": [7], "data_offsets": [lead, stop]},
    }
    path = write_raw(tmp_path / "x", header, b"\1" * lead + bytes_of(value))
    assert bytes_of(SafetensorsFile(path).read("odd")) == bytes_of(value)
    with safe_open(path, "pt") as opened:
        assert bytes_of(opened.get_tensor("odd")) == bytes_of(value)


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": ONE}, 4, "expected .* 4 are missing"),
        ({"a": ONE}, 12, "expected .* 4 too many"),
        ({"a": ONE}, 0, "8 are missing"),
        ({}, 1, "1 too many"),
        ({"a": ONE, "b": ONE | {"data_offsets": [4, 12]}}, 12, "b overlaps a"),
        ({"a": ONE, "b": ONE}, 8, "b overlaps a"),
        ({"a": ONE, "b": ONE | {"data_offsets": [12, 20]}}, 20, "b leaves a gap after a"),
        ({"a": ONE | {"data_offsets": [4, 12]}}, 12, "a leaves a gap after the header"),
        ({"a": ONE | {"data_offsets": [-8, 0]}}, 0, r"data_offsets \[-8, 0\]"),
        ({"a": ONE | {"data_offsets": [8, 0]}}, 8, r"data_offsets \[8, 0\]"),
        ({"a": ONE | {"data_offsets": [0.0, 8.0]}}, 8, "data_offsets"),
        ({"a": ONE | {"data_offsets": [False, 8]}}, 8, "data_offsets"),
        ({"a": ONE | {"data_offsets": [0, 2**63]}}, 8, "data_offsets"),
        ({"a": ONE | {"data_offsets": [0]}}, 8, "data_offsets"),
        ({"a": ONE | {"data_offsets": [0, 8, 8]}}, 8, "data_offsets"),
        ({"a": ONE | {"data_offsets": "08"}}, 8, "data_offsets"),
        ({"a": ONE | {"data_offsets": None}}, 8, "data_offsets"),
        ({"a": ONE | {"shape": [-2]}}, 8, r"shape \[-2\]"),
        ({"a": ONE | {"shape": [-1, -2]}}, 8, "shape"),
        ({"a": ONE | {"shape": [True, 2]}}, 8, "shape"),
        ({"a": ONE | {"shape": [2.0]}}, 8, "shape"),
        ({"a": ONE | {"shape": 2}}, 8, "shape 2"),
        ({"a": ONE | {"shape": [2**41]}}, 8, "shape"),
        ({"a": ONE | {"shape": [1] * 9}}, 8, "shape"),
        ({"a": ONE | {"shape": [2**40] * 8}}, 8, "has 8 bytes, expected "),
        ({"a": ONE | {"shape": [3]}}, 8, r"a \(F32 \[3\]\) has 8 bytes, expected 12"),
        ({"a": ONE | {"shape": []}}, 8, "has 8 bytes, expected 4"),
        ({"a": ONE | {"dtype": "F33"}}, 8, "dtype 'F33', expected one of F64, F32"),
        ({"a": ONE | {"dtype": ""}}, 8, "dtype ''"),
        ({"a": ONE | {"dtype": ["F32"]}}, 8, r"dtype \['F32'\]"),
        ({"a": ONE | {"dtype": None}}, 8, "dtype None"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "a has no dtype, shape and data_offsets"),
        ({"a": ONE | {"more": 1}}, 8, "a has no dtype"),
        ({"a": [0, 8]}, 8, "a has no dtype"),
        ({"a": None}, 8, "a has no dtype"),
        ({"a\u001b[31m": ONE}, 8, "not a tensor name"),
        ({"\ud800": ONE}, 8, "half of a surrogate pair"),
        ({"__metadata__": [], "a": ONE | {"shape": 5}}, 8, "shape"),
        ({"__metadata__": "x", "a": ONE}, 8, "__metadata__ is not an object"),
        ({"__metadata__": {"n": 1}, "a": ONE}, 8, "__metadata__ is not an object of strings"),
        (b"[]", 0, "holds list"),
        (b"", 0, "not JSON"),
        (b'{"a": 1, "a": 2}', 0, "key 'a' is duplicated"),
        (b'{"a": {"dtype": "U8", "dtype": "F32"}}', 0, "key 'dtype' is duplicated"),
        (b'{"\xff": 1}', 0, "not JSON: 'utf-8'"),
        (b'{"a": ' + b"[" * 200_000, 0, "nested too deeply"),
        (b'{"a": NaN}', 0, "NaN"),
    ],
)
def test_a_hostile_header_is_refused_with_the_file_and_the_reason(tmp_path, header, data, message):
    path = write_raw(tmp_path / "bad.safetensors", header, bytes(data))
    with pytest.raises(FormatError, match=message) as caught:
        read_header(path)
    assert str(caught.value).startswith("bad.safetensors")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has 0 bytes"),
        (b"\1\2\3", "has 3 bytes"),
        (struct.pack("<Q", 2) + b"{", "says its header has 2 bytes, expected at most 1 in a file"),
        (struct.pack("<Q", 2**63) + b"{}", "9223372036854775808 bytes, expected at most 2"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "expected at most 2"),
    ],
)
def test_a_header_longer_than_its_file_is_refused(tmp_path, data, message):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=message):
        read_header(path)


def test_a_header_over_100_mb_is_refused_unread(tmp_path):
    path = tmp_path / "bad.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER + 1))
        file.truncate(MAX_HEADER + 100)  # a hole, not bytes
    with pytest.raises(FormatError, match="expected at most 100000000"):
        read_header(path)


@pytest.mark.parametrize("name", ["absent", "."])
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name):
    with pytest.raises(FormatError, match="cannot be read"):
        read_header(tmp_path / name)


@pytest.mark.parametrize("metadata", [None, {}])
def test_metadata_may_be_absent_or_empty(tmp_path, metadata):
    header = {"a": ONE} if metadata is None else {"__metadata__": metadata, "a": ONE}
    found = read_header(write_raw(tmp_path / "x", header, bytes(8)))
    assert found.metadata == {}
    assert found.infos == {"a": TensorInfo("a", "F32", (2,))}


def test_an_empty_stub_without_a_type_is_dropped_by_name(tmp_path):
    """NeMo Automodel leaks these; the library cannot read such a file at all."""
    stub = {"dtype": "", "shape": [], "data_offsets": [8, 8]}
    found = read_header(write_raw(tmp_path / "x", {"a": ONE, "stub": stub}, bytes(8)))
    assert list(found.infos) == ["a"]
    assert found.stubs == ("stub",)


def test_a_file_of_no_tensors_is_a_file(tmp_path):
    head, offsets = build_header([], {})
    (tmp_path / "x").write_bytes(head)
    assert offsets == []
    assert read_header(tmp_path / "x").infos == {}


def test_a_view_is_read_only_bytes_of_the_file(tmp_path):
    path = write_ours(tmp_path / "x", {"a": ("F32", tensor_of("F32", (64,)))})
    ours = SafetensorsFile(path)
    one, two = ours.read("a"), ours.read("a")
    assert one.data_ptr() == two.data_ptr()


def test_a_view_stays_valid_when_its_pages_are_given_back(tmp_path):
    file = SafetensorsFile(write_ours(tmp_path / "x", {"a": ("F32", tensor_of("F32", (8, 8)))}))
    file.release()
    view = file.read("a")
    before = bytes_of(view)
    file.release()
    assert bytes_of(view) == before


def resident(path: Path) -> int:
    """Return the bytes of a file that are in this process's memory."""
    lines, total = SMAPS.read_text().splitlines(), 0
    for i, line in enumerate(lines):
        if line.endswith(str(path)):
            total += int(next(x for x in lines[i:] if x.startswith("Rss:")).split()[1]) << 10
    return total


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.safetensors"
    count = 64 << 20
    head, _ = build_header([TensorInfo("a", "U8", (count,))], {})
    with path.open("wb") as file:
        file.write(head)
        for _ in range(64):
            file.write(b"\7" * (1 << 20))
    return path


@needs_smaps
def test_release_gives_the_pages_back(large):
    file = SafetensorsFile(large)
    view = file.read("a")
    assert resident(large) < 1 << 20
    assert int(view.max()) == 7
    assert resident(large) >= 64 << 20
    file.release()
    assert resident(large) == 0
    assert int(view[12345]) == 7


def test_threads_share_one_map(tmp_path):
    path = write_ours(tmp_path / "x", {"a": ("F32", tensor_of("F32", (64,)))})
    file = SafetensorsFile(path)
    gate, found = threading.Barrier(8), []

    def read() -> None:
        gate.wait()
        found.append(file.read("a").data_ptr())

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
