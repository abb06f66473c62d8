"""One GGUF file: what is written is read back by us and by ggml's own package."""

from __future__ import annotations

import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.errors import FormatError
from formats.gguf.cursor import KINDS
from formats.gguf.file import ALIGNMENT, GgufFile, build_header
from formats.gguf.header import Kv
from formats.safetensors.file import TORCH_NAMES
from formats.tensor import TensorInfo, block_of
from tests.formats.gguf.by_hand import (
    ARRAY,
    BOOL,
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
    write,
)
from tests.gguf_reader import read_gguf

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
        ours, theirs = GgufFile(path), read_gguf(path)
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


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("string", ["a", "", "\u00e9\u4e2d"]),
        ("bool", [True, False]),
        *((kind, [0, 1, 127]) for kind in ("uint8", "int8", "uint16", "int16", "uint32")),
        *((kind, [-(2**31), 2**31 - 1]) for kind in ("int32", "int64")),
        ("uint64", [2**64 - 1]),
        *((kind, [-1.5, 0.1]) for kind in ("float32", "float64")),
    ],
)
def test_an_array_has_the_bytes_that_the_package_gives_it(kind, values):
    types = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType[kind.upper()]
    package = gguf.GGUFWriter(None, arch="")
    theirs = package._pack_val(values, types[0], add_vtype=True, sub_type=types[1])
    head, _ = build_header([Kv("x", f"array[{kind}]", values)], [])
    assert head[33 : 33 + len(theirs)] == theirs  # magic, version, counts; the key and its length


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
