"""One GGUF file: what is written is read back by us and by ggml's own package; lies are refused."""

from __future__ import annotations

import struct
import tempfile
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import FormatError
from formats.gguf.file import ALIGNMENT, GgufFile, build_header
from formats.gguf.header import KINDS, MAX_ITEMS, MAX_PAIRS, MAX_TENSORS, Kv
from formats.gguf.split import files_of, open_files, split_name, split_pairs
from formats.safetensors.file import TORCH_NAMES
from formats.tensor import TensorInfo, block_of

STRING, ARRAY, BOOL, U32, I32, F32 = 8, 9, 7, 4, 5, 6
HUGE = (1 << 64) - 1


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes, length: int | None = None) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return u64(len(data) if length is None else length) + data


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + u32(kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return u32(kind) + u64(count) + items


def tensor(
    name: str | bytes,
    sizes: tuple[int, ...] = (8,),
    kind: int = 0,
    offset: int = 0,
    dims: int | None = None,
) -> bytes:
    count = len(sizes) if dims is None else dims
    return text(name) + u32(count) + b"".join(map(u64, sizes)) + u32(kind) + u64(offset)


def raw(
    pairs: tuple[bytes, ...] = (), tensors: tuple[bytes, ...] = (), data: int = 0, **start: Any
) -> bytes:
    """Write a file by hand: this header, padded, and so many zero bytes of data."""
    said = {"magic": b"GGUF", "version": 3} | start
    head = said["magic"] + u32(said["version"])
    head += u64(said.get("num_tensors", len(tensors))) + u64(said.get("num_pairs", len(pairs)))
    head += b"".join(pairs) + b"".join(tensors)
    pad = said.get("pad", -len(head) % said.get("alignment", ALIGNMENT))
    return head + bytes(pad) + bytes(data)


def opened(folder: Path, content: bytes) -> GgufFile:
    path = folder / "x.gguf"
    path.write_bytes(content)
    return GgufFile(path)


def fill(info: TensorInfo, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, info.nbytes, np.uint8).tobytes()


def write(
    path: Path, kvs: list[Kv], infos: list[TensorInfo], alignment: int = ALIGNMENT
) -> dict[str, bytes]:
    """Write a file with `build_header` and seeded bytes, and return the bytes by name."""
    head, offsets = build_header(kvs, infos, alignment)
    content, datas = bytearray(head), {}
    for seed, (info, offset) in enumerate(zip(infos, offsets, strict=True)):
        assert len(content) == offset
        datas[info.name] = fill(info, seed)
        content += datas[info.name]
        content += bytes(-len(content) % alignment)
    path.write_bytes(content)
    return datas


@contextmanager
def costing_less_than(nbytes: int) -> Iterator[None]:
    """Hold what is allocated inside to a bound."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < nbytes
    finally:
        tracemalloc.stop()


def bytes_of(value: torch.Tensor) -> bytes:
    return value.reshape(-1).view(torch.uint8).numpy().tobytes()


# Reading what the gguf package writes, and the other way round

RANGES = {"uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64}
SCALARS: dict[str, st.SearchStrategy[Any]] = {
    **{kind: st.integers(0, (1 << bits) - 1) for kind, bits in RANGES.items()},
    **{
        kind[1:]: st.integers(-1 << (bits - 1), (1 << (bits - 1)) - 1)
        for kind, bits in RANGES.items()
    },
    "float32": st.floats(width=32, allow_nan=False),
    "float64": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
}
words = st.text("abcdefghijklmnopqrstuvwxyz0123456789._", min_size=1, max_size=20)


@st.composite
def pairs(draw: st.DrawFn) -> list[Kv]:
    found = []
    for key in draw(st.lists(words, max_size=8, unique=True)):
        kind = draw(st.sampled_from(sorted(SCALARS)))
        if draw(st.booleans()):
            values = draw(st.lists(SCALARS[kind], min_size=1, max_size=5))
            found.append(Kv("k." + key, f"array[{kind}]", values))
        else:
            found.append(Kv("k." + key, kind, draw(SCALARS[kind])))
    return found


@st.composite
def tensor_infos(draw: st.DrawFn) -> list[TensorInfo]:
    infos = []
    for name in draw(st.lists(words, max_size=5, unique=True)):
        kind = draw(st.sampled_from([kind.name for kind in gguf.GGML_QUANT_SIZES]))
        leading = draw(st.lists(st.integers(1, 4), max_size=3))
        columns = draw(st.integers(1, 3)) * block_of(kind)[0]
        infos.append(TensorInfo(name, kind, (*leading, columns)))
    return infos


@settings(max_examples=60)
@given(kvs=pairs(), infos=tensor_infos(), alignment=st.sampled_from([8, 32, 64]))
def test_what_is_written_is_read_back_by_us_and_by_ggmls_package(kvs, infos, alignment):
    if alignment != ALIGNMENT:
        kvs = [*kvs, Kv("general.alignment", "uint32", alignment)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        datas = write(path, kvs, infos, alignment)
        ours, theirs = GgufFile(path), gguf.GGUFReader(path)
        assert list(ours.kv.values()) == kvs
        assert ours.alignment == alignment
        assert list(ours.infos.values()) == infos
        fields = {key: f for key, f in theirs.fields.items() if not key.startswith("GGUF.")}
        assert {key: field.contents() for key, field in fields.items()} == {
            kv.key: kv.value for kv in kvs
        }
        assert [t.name for t in theirs.tensors] == [info.name for info in infos]
        for info, tensor in zip(infos, theirs.tensors, strict=True):
            assert (tensor.tensor_type.name, tensor.n_bytes) == (info.dtype, info.nbytes)
            assert tuple(reversed(tensor.shape.tolist())) == info.shape
            assert ours.ranges[info.name] == (tensor.data_offset, tensor.data_offset + info.nbytes)
            assert bytes_of(ours.read(info.name)) == tensor.data.tobytes() == datas[info.name]


def test_what_ggmls_package_writes_is_read(tmp_path):
    values = np.arange(6 * 64, dtype=np.float32).reshape(2, 3, 64) / 7
    codes = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen35")
    writer.add_array("words", ["a", "", "\u00e9\u4e2d"])
    writer.add_array("flags", [True, False])
    writer.add_float32("small", 1e-6)
    writer.add_tensor("plain", values)
    writer.add_tensor("half", values.astype(np.float16))
    writer.add_tensor("codes", codes, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(tmp_path / "x.gguf")
    assert file.kv["general.architecture"] == Kv("general.architecture", "string", "qwen35")
    assert file.kv["words"] == Kv("words", "array[string]", ["a", "", "\u00e9\u4e2d"])
    assert file.kv["flags"] == Kv("flags", "array[bool]", [True, False])
    assert file.kv["small"] == Kv("small", "float32", float(np.float32(1e-6)))
    assert file.infos["codes"] == TensorInfo("codes", "Q8_0", (2, 3, 64))
    assert torch.equal(file.read("plain"), torch.from_numpy(values))
    assert torch.equal(file.read("half"), torch.from_numpy(values).half())
    assert torch.equal(file.read("codes"), torch.from_numpy(codes))


def test_the_header_is_what_is_written_by_hand(tmp_path):
    kvs = [
        Kv("general.architecture", "string", "qwen35"),
        Kv("n", "uint32", 7),
        Kv("flags", "array[bool]", [True, False]),
        Kv("words", "array[string]", ["a", ""]),
    ]
    infos = [TensorInfo("w", "Q4_K", (3, 512)), TensorInfo("b", "F32", (5,))]
    head, offsets = build_header(kvs, infos)
    assert head == raw(
        (
            pair("general.architecture", STRING, text("qwen35")),
            pair("n", U32, u32(7)),
            pair("flags", ARRAY, array(BOOL, 2, b"\1\0")),
            pair("words", ARRAY, array(STRING, 2, text("a") + text(""))),
        ),
        (tensor("w", (512, 3), 12, 0), tensor("b", (5,), 0, 864)),
    )
    assert offsets == [len(head), len(head) + 864]  # 3 rows of 2 blocks of 144 bytes: 27 x 32
    assert build_header(kvs, infos) == (head, offsets)


def test_kinds_have_the_numbers_of_ggmls_package():
    assert {kind.name.lower(): int(kind) for kind in gguf.GGUFValueType} == {
        kind: number for number, kind in enumerate(KINDS)
    }


def test_version_2_is_read_like_version_3(tmp_path):
    write(tmp_path / "x.gguf", [Kv("n", "int16", -3)], [TensorInfo("w", "F32", (2, 4))])
    content = bytearray((tmp_path / "x.gguf").read_bytes())
    content[4] = 2
    file = opened(tmp_path, bytes(content))
    assert (file.version, file.kv["n"].value, file.infos["w"].shape) == (2, -3, (2, 4))


def test_a_scalar_and_a_file_without_tensors_are_read(tmp_path):
    assert opened(tmp_path, raw((), (tensor("s", ()),), 4)).read("s").shape == ()
    for pad in (0, None):
        content = raw((pair("n", U32, u32(1)),), **({} if pad is None else {"pad": pad}))
        file = opened(tmp_path, content)
        assert (len(file.kv), file.infos, "n" in file.kv, "m" in file.kv) == (1, {}, True, False)


def test_the_padding_after_the_last_tensor_may_be_missing(tmp_path):
    for data in (20, 32):
        file = opened(tmp_path, raw((), (tensor("w", (5,)),), data))
        assert file.read("w").tolist() == [0] * 5


def test_views_stay_valid_when_pages_are_given_back(tmp_path):
    datas = write(tmp_path / "x.gguf", [], [TensorInfo("w", "Q6_K", (64, 256))])
    file = GgufFile(tmp_path / "x.gguf")
    view = file.read("w")
    file.release()
    assert view.shape == (64, 210)
    assert bytes_of(view) == datas["w"]


def test_a_real_vocabulary_costs_its_header_until_it_is_asked_for(tmp_path):
    tokens = [f"token{i}" for i in range(248_320)]
    items = b"".join(map(text, tokens))
    content = raw((pair("tokens", ARRAY, array(STRING, len(tokens), items)),))
    (tmp_path / "x.gguf").write_bytes(content)
    with costing_less_than(len(content) + (1 << 18)):
        file = GgufFile(tmp_path / "x.gguf")
    assert file.kv["tokens"].value == tokens


# Sizes of block formats


def test_bytes_of_every_block_format_are_those_of_ggmls_package():
    for kind, (block, _) in gguf.GGML_QUANT_SIZES.items():
        shape = (3, 5, 2 * block)
        expected = gguf.quants.quant_shape_to_byte_shape(shape, kind)
        wide = kind.name in TORCH_NAMES
        assert TensorInfo("w", kind.name, shape).nbytes == int(np.prod(expected)), kind
        assert wide == (block == 1), kind


@pytest.mark.parametrize("shape", [(), (31,), (32, 33), (2, 2, 16)])
def test_rows_that_are_not_whole_blocks_are_refused(shape):
    with pytest.raises(FormatError, match=r"w has shape .*, expected rows of a multiple of 32"):
        _ = TensorInfo("w", "Q8_0", shape).nbytes


def test_our_own_mistakes_in_a_header_are_assertions():
    w = TensorInfo("w", "F32", (2,))
    for kvs, infos, alignment, reason in (
        ([Kv("n", "uint8", 1)] * 2, [], 32, "written twice"),
        ([], [w, w], 32, "written twice"),
        ([Kv("n", "array[uint8]", [])], [], 32, "no empty array: ..n.."),
        ([], [TensorInfo("w" * 64, "F32", (2,))], 32, "up to 63 bytes"),
        ([], [w], 64, "general.alignment is 32"),
        ([Kv("general.alignment", "uint32", 64)], [w], 32, "general.alignment is 64"),
    ):
        with pytest.raises(AssertionError, match=reason):
            build_header(kvs, infos, alignment)


# Hostile files

W = tensor("w")
ONE = pair("n", U32, u32(1))
HOSTILE: dict[str, tuple[bytes, str]] = {
    # the start
    "empty": (b"", "has 0 bytes, expected a GGUF file"),
    "magic only": (b"GGUF", "has 4 bytes"),
    "one byte short": (raw(pad=0)[:-1], "has 23 bytes"),
    "another magic": (raw(magic=b"GGML"), "starts with b'GGML', expected b'GGUF'"),
    "swapped magic": (raw(magic=b"FUGG"), "starts with b'FUGG'"),
    "a zip": (raw(magic=b"PK\3\4"), "starts with"),
    "big-endian": (raw(version=3 << 24), "big-endian"),
    "big-endian 2": (raw(version=2 << 24), "big-endian"),
    "version 0": (raw(version=0), "big-endian|version 0"),
    "version 1": (raw(version=1), "version 1, expected 2 or 3"),
    "version 4": (raw(version=4), "version 4"),
    "huge version": (raw(version=(1 << 32) - 1), "version 4294967295"),
    # counts
    "huge pair count": (raw(num_pairs=HUGE), f"promises {HUGE} keys, expected at most"),
    "many pairs": (raw(num_pairs=MAX_PAIRS + 1), "promises 65537 keys"),
    "huge tensor count": (raw(num_tensors=HUGE), f"promises {HUGE} tensors"),
    "many tensors": (raw(num_tensors=MAX_TENSORS + 1), "promises 65537 tensors"),
    "pairs that are not there": (raw(num_pairs=3, pad=0), "key 0 needs 8 bytes at byte 24"),
    "one pair too few": (raw((ONE,), num_pairs=2, pad=0), "key 1 needs 8 bytes"),
    "two pairs too many": (raw((ONE,) * 3, num_pairs=1), "expected 64: 32 too many"),
    "one tensor too few": (raw((), (W,), num_tensors=2, pad=0), "tensor 1 needs 8 bytes"),
    # keys
    "empty key": (raw((pair("", U32, u32(1)),)), "key 0 has a name of 0 bytes"),
    "long key": (raw((pair("k" * 65536, U32, u32(1)),)), "key 0 has a name of 65536 bytes"),
    "huge key": (raw((text("k", HUGE),), num_pairs=1), f"key 0 has a name of {HUGE} bytes"),
    "key past the end": (raw((text("k", 99),), num_pairs=1, pad=0), "key 0 needs 99 bytes"),
    "newline in a key": (raw((pair("a\nb", U32, u32(1)),)), r"is named 'a\\nb'"),
    "NUL in a key": (raw((pair("a\0", U32, u32(1)),)), r"is named 'a\\x00'"),
    "escape in a key": (raw((pair("\x1b[2J", U32, u32(1)),)), r"is named '\\x1b\[2J'"),
    "key that is not UTF-8": (raw((pair(b"\xff", U32, u32(1)),)), "key 0 has bytes that are not"),
    "the same key twice": (raw((ONE, ONE)), "n is duplicated"),
    # values
    "no type": (raw((text("n"),), num_pairs=1, pad=0), "n needs 4 bytes"),
    "type 13": (raw((pair("n", 13, u32(1)),)), "n has value type 13, expected 0 to 12"),
    "huge type": (raw((pair("n", (1 << 32) - 1, u32(1)),)), "n has value type 4294967295"),
    "short value": (raw((pair("n", U32, b"\0"),), pad=0), "n needs 4 bytes"),
    "short double": (raw((pair("n", 12, b"\0" * 7),), pad=0), "n needs 8 bytes"),
    "a bool of 2": (raw((pair("n", BOOL, b"\2"),)), "n has the bool 2"),
    "short string": (raw((pair("n", STRING, text("ab", 3)),), pad=0), "n needs 3 bytes"),
    "huge string": (raw((pair("n", STRING, text("", HUGE)),)), f"n needs {HUGE} bytes"),
    "string without length": (raw((pair("n", STRING, b"\0"),), pad=0), "n needs 8 bytes"),
    "string that is not UTF-8": (raw((pair("n", STRING, text(b"\xc3")),)), "not UTF-8"),
    "a surrogate": (raw((pair("n", STRING, text(b"\xed\xa0\x80")),)), "not UTF-8"),
    # arrays
    "array without type": (raw((pair("n", ARRAY, b""),), pad=0), "n needs 4 bytes"),
    "array without count": (raw((pair("n", ARRAY, u32(U32)),), pad=0), "n needs 8 bytes"),
    "array of type 13": (raw((pair("n", ARRAY, array(13, 0, b"")),)), "value type 13"),
    "array of arrays": (raw((pair("n", ARRAY, array(ARRAY, 1, b"")),)), "array of arrays"),
    "deep arrays": (
        raw((pair("n", ARRAY, array(ARRAY, 1, b"") * 5000),)), "n is an array of arrays"),
    "huge array": (raw((pair("n", ARRAY, array(0, HUGE, b"")),)), f"n has {HUGE} items"),
    "huge array of strings": (
        raw((pair("n", ARRAY, array(STRING, HUGE, b"")),)), f"n has {HUGE} items"),
    "long array": (raw((pair("n", ARRAY, array(0, MAX_ITEMS + 1, b"")),)), "n has 1048577 items"),
    "array past the end": (
        raw((pair("n", ARRAY, array(U32, MAX_ITEMS, b"")),), pad=0), "n needs 4194304 bytes"),
    "strings past the end": (
        raw((pair("n", ARRAY, array(STRING, MAX_ITEMS, text("a"))),), pad=0),
        "n has 1048576 strings, expected them to end by byte"),
    "string of an array past the end": (
        raw((pair("n", ARRAY, array(STRING, 2, text("a") + text("b", 9))),), pad=0),
        "n has 2 strings"),
    "huge string of an array": (
        raw((pair("n", ARRAY, array(STRING, 2, text("a", HUGE) + text("b"))),)), "n has 2 strings"),
    # tensors' names, sizes and types
    "empty name": (raw((), (tensor(""),), 32), "tensor 0 has a name of 0 bytes"),
    "long name": (raw((), (tensor("w" * 64),), 32), "tensor 0 has a name of 64 bytes"),
    "very long name": (raw((), (tensor("w" * 70000),), 32), "tensor 0 has a name of 70000 bytes"),
    "huge name": (raw((), (text("w", HUGE),)), f"tensor 0 has a name of {HUGE}"),
    "tab in a name": (raw((), (tensor("a\tb"),), 32), r"is named 'a\\tb'"),
    "name that is not UTF-8": (raw((), (tensor(b"\x80"),), 32), "tensor 0 has bytes that are not"),
    "the same tensor twice": (raw((), (W, tensor("w", offset=32)), 64), "w is duplicated"),
    "no dimensions": (raw((), (text("w"),), pad=0), "w needs 4 bytes"),
    "5 dimensions": (raw((), (tensor("w", (1,) * 5),), 32), "w has 5 dimensions"),
    "huge dimensions": (raw((), (tensor("w", dims=(1 << 32) - 1),)), "w has 4294967295 dimensions"),
    "sizes cut": (raw((), (text("w") + u32(4) + u64(1),), pad=0), "w needs 8 bytes"),
    "size 0": (raw((), (tensor("w", (8, 0)),), 32), r"w has sizes \[8, 0\], expected 1 to"),
    "negative size": (raw((), (tensor("w", (HUGE,)),), 32), "w has sizes"),
    "huge size": (raw((), (tensor("w", (1 << 63,)),), 32), "w has sizes"),
    "product of 2^64": (raw((), (tensor("w", (1 << 32, 1 << 32)),), 32), "w ends at byte"),
    "product of 2^160": (raw((), (tensor("w", (1 << 40,) * 4),), 32), "w ends at byte"),
    "type of old": (raw((), (tensor("w", kind=4),), 32), "w has tensor type 4, expected one of"),
    "type of tomorrow": (raw((), (tensor("w", kind=999),), 32), "w has tensor type 999"),
    "huge tensor type": (raw((), (tensor("w", kind=(1 << 32) - 1),), 32), "4294967295"),
    "type cut": (raw((), (text("w") + u32(1) + u64(8),), pad=0), "w needs 4 bytes"),
    "offset cut": (raw((), (W[:-1],), pad=0), "w needs 8 bytes"),
    "half a block": (raw((), (tensor("w", (48,), 8),), 64), "w has shape .* a multiple of 32"),
    "a scalar of blocks": (raw((), (tensor("w", (), 8),), 64), "w has shape .* a multiple of 32"),
    # alignment
    "alignment 0": (raw((pair("general.alignment", U32, u32(0)),)), "general.alignment is 0"),
    "alignment 1": (raw((pair("general.alignment", U32, u32(1)),)), "general.alignment is 1"),
    "alignment 48": (raw((pair("general.alignment", U32, u32(48)),)), "general.alignment is 48"),
    "alignment of 64 bits": (raw((pair("general.alignment", 10, u64(32)),)), "32 .uint64."),
    "alignment in words": (raw((pair("general.alignment", STRING, text("32")),)), "'32' .string."),
    "huge alignment": (
        raw((pair("general.alignment", U32, u32(1 << 31)),), (W,), 32), "w ends at byte 214748368"),
    # places
    "offset not aligned": (raw((), (tensor("w", offset=8),), 64), "w is at offset 8, expected a"),
    "gap at the start": (raw((), (tensor("w", offset=32),), 64), "w leaves a gap after the header"),
    "gap": (raw((), (W, tensor("v", offset=64)), 96), r"v leaves a gap after w .*64, not 32"),
    "overlap": (raw((), (W, tensor("v", offset=0)), 64), r"v overlaps w .offset 0, not 32"),
    "order": (raw((), (tensor("w", offset=32), tensor("v")), 64), "w leaves a gap"),
    "huge offset": (raw((), (tensor("w", offset=HUGE - 31),), 32), "w leaves a gap"),
    "data cut": (raw((), (W,), 31), "w ends at byte .*, expected at most .*, the file's end"),
    "no data": (raw((), (W,), 0), "w ends at byte"),
    "no padding": (raw((), (W,), 0, pad=0), "w ends at byte"),
    "data too long": (raw((), (W,), 33), "bytes, expected .*: 1 too many"),
    "data without tensors": (raw((), (), 32), "32 too many"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_by_name_at_no_cost(tmp_path, case):
    content, reason = HOSTILE[case]
    with (
        costing_less_than(2 * len(content) + (1 << 20)),
        pytest.raises(FormatError, match=reason) as caught,
    ):
        opened(tmp_path, content)
    assert str(caught.value).startswith("x.gguf")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (array(STRING, 2, text("a") + text(b"\xff")), r"n\[1\] has bytes that are not UTF-8"),
        (array(BOOL, 3, b"\0\1\2"), "n has the bool 2, expected 0 or 1"),
    ],
)
def test_an_array_is_checked_when_it_is_asked_for(tmp_path, value, reason):
    file = opened(tmp_path, raw((pair("n", ARRAY, value), pair("m", U32, u32(5)))))
    assert file.kv["m"].value == 5
    with pytest.raises(FormatError, match=reason):
        file.kv.get("n")


def test_a_folder_and_a_file_that_is_not_there_are_refused(tmp_path):
    for path, reason in ((tmp_path, "cannot be read|expected a GGUF"), (tmp_path / "x", "No such")):
        with pytest.raises(FormatError, match=reason):
            GgufFile(path)


def good() -> bytes:
    """Return a file with a value of every kind and three tensors."""
    kvs = [Kv(f"one.{kind}", kind, 1) for kind in SCALARS if kind != "string"]
    kvs += [Kv(f"some.{kind}", f"array[{kind}]", [1, 0]) for kind in SCALARS if kind != "string"]
    kvs += [Kv("one.string", "string", "ab"), Kv("some.string", "array[string]", ["ab", "", "c"])]
    infos = [
        TensorInfo("w", "Q4_0", (2, 64)),
        TensorInfo("b", "F32", (5,)),
        TensorInfo("h", "BF16", (2, 3)),
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.gguf"
        write(path, [*kvs, Kv("general.alignment", "uint32", 32)], infos)
        return path.read_bytes()


GOOD = good()
INTERESTING = st.sampled_from([0, 1, 2, 7, 8, 9, 13, 31, 32, 127, 128, 255])
positions = st.integers(0, len(GOOD) - 1)
changes = st.one_of(
    st.tuples(st.just("flip"), positions, INTERESTING | st.integers(0, 255)),
    st.tuples(st.just("word"), positions, st.sampled_from([0, 1, 1 << 31, 1 << 40, 1 << 63, HUGE])),
    st.tuples(st.just("insert"), positions, st.binary(min_size=1, max_size=9)),
    st.tuples(st.just("cut"), positions, st.integers(1, 40)),
    st.tuples(st.just("end"), positions, st.just(0)),
)


def changed(content: bytes, what: str, at: int, value: Any) -> bytes:
    """Return the content with one thing done to it."""
    if what == "flip":
        return content[:at] + bytes([value]) + content[at + 1 :]
    if what == "word":
        return content[:at] + u64(value) + content[at + 8 :]
    if what == "insert":
        return content[:at] + value + content[at:]
    return content[:at] + (content[at + value :] if what == "cut" else b"")


@settings(max_examples=500)
@given(st.lists(changes, min_size=1, max_size=3))
def test_a_damaged_file_is_refused_or_read_and_never_breaks_us(damage):
    content = GOOD
    for what, at, value in damage:
        content = changed(content, what, at, value)
    with tempfile.TemporaryDirectory() as folder, costing_less_than(1 << 20):
        try:
            file = opened(Path(folder), content)
            assert sum(info.nbytes for info in file.infos.values()) <= len(content)
            for name in file.infos:
                assert bytes_of(file.read(name)) == content[slice(*file.ranges[name])]
            assert len(dict(file.kv)) == len(file.kv)
        except FormatError as error:
            assert str(error).startswith("x.gguf")  # noqa: PT017


# Models in several files


def write_split(folder: Path, count: int = 3, **said: Any) -> list[Path]:
    """Write a model of one tensor per file; `said` replaces what file 2 says of the split."""
    paths = []
    for index in range(1, count + 1):
        path = folder / split_name("m", index, count)
        kvs = [Kv("general.name", "string", "m")] if index == 1 else []
        own = [
            Kv(kv.key, kv.kind, said.get(kv.key, kv.value)) if index == 2 else kv
            for kv in split_pairs(index, count, count)
        ]
        name = said.get("name", f"w{index}") if index == 2 else f"w{index}"
        write(
            path, kvs + [kv for kv in own if kv.value is not None], [TensorInfo(name, "F32", (2,))]
        )
        paths.append(path)
    return paths


def test_a_split_model_is_found_from_any_of_its_files(tmp_path):
    paths = write_split(tmp_path)
    for path in paths:
        assert files_of(path) == paths
    files = open_files(paths[2])
    assert [list(file.infos) for file in files] == [["w1"], ["w2"], ["w3"]]
    assert files[0].kv["general.name"].value == "m"
    assert files_of(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]


def test_what_ggmls_package_splits_is_opened(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen35", split_max_tensors=2)
    for i in range(5):
        writer.add_tensor(f"w{i}", np.full((2, 3), i, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = open_files(tmp_path / "m-00002-of-00003.gguf")
    assert [len(file.infos) for file in files] == [2, 2, 1]
    assert files[2].read("w4").tolist() == [[4] * 3] * 2


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"split.no": 2}, "m-00002-of-00003.gguf: split.no is 2, expected 1"),
        ({"split.count": 4}, "split.count is 4, expected 3"),
        ({"split.tensors.count": 9}, "split.tensors.count is 9, expected 3"),
        ({"split.no": None}, "split.no is missing, expected 1"),
        ({"name": "w1"}, "m-00002-of-00003.gguf: w1 is in m-00001-of-00003.gguf too"),
    ],
)
def test_files_that_disagree_about_the_split_are_refused(tmp_path, said, reason):
    paths = write_split(tmp_path, **said)
    with pytest.raises(FormatError, match=reason):
        open_files(paths[0])


def test_a_missing_or_renamed_file_of_a_split_is_refused(tmp_path):
    paths = write_split(tmp_path)
    paths[1].rename(tmp_path / "alone.gguf")
    with pytest.raises(FormatError, match=r"m-00002-of-00003.gguf is missing .1 of 3"):
        files_of(paths[0])
    with pytest.raises(FormatError, match=r"alone.gguf: split.no is 1, expected 0"):
        open_files(tmp_path / "alone.gguf")
    for index in (0, 4):
        with pytest.raises(FormatError, match=f"is file {index} of 3"):
            files_of(tmp_path / f"m-0000{index}-of-00003.gguf")


def test_a_single_file_may_be_named_as_one_of_one(tmp_path):
    path = tmp_path / split_name("m", 1, 1)
    write(path, [], [TensorInfo("w", "F32", (2,))])
    assert len(open_files(path)) == 1
