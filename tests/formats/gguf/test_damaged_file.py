"""A GGUF file that lies, or was damaged, is refused by name, at no cost."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import FormatError
from formats.gguf.file import GgufFile
from formats.gguf.header import MAX_ITEMS, MAX_PAIRS, MAX_TENSORS, Kv
from formats.tensor import TensorInfo
from tests.formats.gguf.by_hand import (
    ARRAY,
    BOOL,
    HUGE,
    SCALARS,
    STRING,
    U32,
    array,
    bytes_of,
    costing_less_than,
    opened,
    pair,
    raw,
    tensor,
    text,
    u32,
    u64,
    write,
)

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
