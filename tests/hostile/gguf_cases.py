"""Hostile GGUF files: lying counts and lengths, unknown types, keys that contradict the tensors."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

from formats.family.config import read_config
from formats.family.ops import shape_after
from formats.family.slots import Form, family
from formats.gguf.file import build_header
from formats.gguf.header import Kv
from formats.gguf.metadata import text_metadata
from formats.gguf.names import gguf_name, ops_to_gguf
from formats.tensor import TensorInfo
from tests.hostile.case import Case, Harm, harm_file, hole, small_config

FILE = "model.gguf"
ARCH = "qwen35"
HUGE = (1 << 64) - 1
U8, U32, F32, BOOL, STRING, ARRAY, F64 = 0, 4, 6, 7, 8, 9, 12


def u32(value: int) -> bytes:
    """Return four bytes."""
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    """Return eight bytes."""
    return struct.pack("<Q", value)


def text(value: bytes, length: int | None = None) -> bytes:
    """Return a string that says it has so many bytes."""
    return u64(len(value) if length is None else length) + value


def head(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_pairs: int | None = None,
    data: int = 0,
) -> bytes:
    """Return a file written by hand: a header that may lie, padding, so many zeros of data."""
    counts = u64(len(tensors) if num_tensors is None else num_tensors)
    counts += u64(len(pairs) if num_pairs is None else num_pairs)
    said = magic + u32(version) + counts + b"".join(pairs) + b"".join(tensors)
    return said + bytes(-len(said) % 32) + bytes(data)


def pair(key: bytes, kind: int, value: bytes) -> bytes:
    """Return a pair of the metadata."""
    return text(key) + u32(kind) + value


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    """Return an array that says it has so many items."""
    return u32(kind) + u64(count) + items


def tensor(
    name: bytes,
    sizes: Sequence[int] = (8,),
    kind: int = 0,
    offset: int = 0,
    dims: int | None = None,
) -> bytes:
    """Return a tensor's entry."""
    count = len(sizes) if dims is None else dims
    return text(name) + u32(count) + b"".join(map(u64, sizes)) + u32(kind) + u64(offset)


def good() -> tuple[list[Kv], list[TensorInfo]]:
    """Return pairs and tensors of the good model, all in F32."""
    config = read_config(small_config())
    pairs = text_metadata(config, about={"name": "small"}, file_type=0, mtp_layers=0)
    infos = []
    for slot in family(config.sizes, config.layer_types, Form(vision=False, mtp_layers=0)):
        name, _ = gguf_name(slot.hub, len(config.layer_types))
        shape = shape_after(ops_to_gguf(slot.rule.role, config.sizes), slot.shape)
        infos.append(TensorInfo(name, "F32", shape))
    return pairs, infos


def harm_pairs(**changes: Kv | None) -> Harm:
    """Return a harm that changes or drops pairs of a right file; `__` in a name is a dot."""

    def harm(folder: Path) -> None:
        pairs, infos = good()
        new = {f"{ARCH}.{key.replace('__', '.')}": kv for key, kv in changes.items()}
        kept = [kv for kv in pairs if kv.key not in new]
        kept += [changed(kv, key=key) for key, kv in new.items() if kv is not None]
        write(folder / FILE, kept, infos)

    return harm


def write(path: Path, pairs: Sequence[Kv], infos: Sequence[TensorInfo]) -> None:
    """Write a file whose data is a hole."""
    header, offsets = build_header(pairs, infos)
    hole(path, -(-(offsets[-1] + infos[-1].nbytes) // 32) * 32, header)


STARTS = {
    "empty": b"",
    "one-byte": b"G",
    "magic-alone": b"GGUF",
    "cut-in-counts": b"GGUF" + u32(3) + b"\0",
    "magic-other": head(magic=b"GGML"),
    "magic-lower": head(magic=b"gguf"),
    "version-0": head(version=0),
    "version-1": head(version=1),
    "version-4": head(version=4),
    "version-huge": head(version=0xFFFFFFFF),
    "big-endian": head(version=3 << 24),
    "nothing": head(),
    "safetensors": u64(2) + b"{}" + bytes(40),
    "zip": b"PK\x03\x04" + bytes(60),
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
}
COUNTS = {
    "tensors-huge": head(num_tensors=HUGE),
    "tensors-2-63": head(num_tensors=1 << 63),
    "tensors-one": head(num_tensors=1),
    "tensors-a-million": head(num_tensors=1_000_000),
    "pairs-huge": head(num_pairs=HUGE),
    "pairs-one": head(num_pairs=1),
    "pairs-a-million": head(num_pairs=1_000_000),
    "pairs-at-the-limit": head(num_pairs=65536),
    "tensors-at-the-limit": head(num_tensors=65536),
}
PAIRS = {
    "key-length-huge": text(b"a", HUGE),
    "key-length-2-63": text(b"a", 1 << 63),
    "key-empty": text(b""),
    "key-long": pair(b"k" * 70_000, U8, b"\1"),
    "key-not-utf-8": pair(b"\xff", U8, b"\1"),
    "key-newline": pair(b"a\nb", U8, b"\1"),
    "key-escape": pair(b"\x1b[2J", U8, b"\1"),
    "kind-13": pair(b"a", 13, bytes(8)),
    "kind-huge": pair(b"a", 0xFFFFFFFF, bytes(8)),
    "bool-2": pair(b"a", BOOL, b"\2"),
    "text-length-huge": pair(b"a", STRING, text(b"x", HUGE)),
    "text-length-2-63": pair(b"a", STRING, text(b"x", 1 << 63)),
    "text-not-utf-8": pair(b"a", STRING, text(b"\xff\xfe")),
    "text-cut": pair(b"a", STRING, u64(4) + b"x"),
    "array-of-arrays": pair(b"a", ARRAY, array(ARRAY, 1, array(U8, 1, b"\1"))),
    "array-deep": pair(b"a", ARRAY, array(ARRAY, 1) * 1000),
    "array-kind-huge": pair(b"a", ARRAY, array(0xFFFFFFFF, 1)),
    "array-count-huge": pair(b"a", ARRAY, array(U8, HUGE)),
    "array-count-2-61": pair(b"a", ARRAY, array(F64, 1 << 61)),
    "array-count-at-the-limit": pair(b"a", ARRAY, array(STRING, 1 << 22)),
    "array-over-the-end": pair(b"a", ARRAY, array(U32, 1000)),
    "array-text-over-the-end": pair(b"a", ARRAY, array(STRING, 2, text(b"x") + u64(HUGE))),
    "array-text-length-2-63": pair(b"a", ARRAY, array(STRING, 1, u64(1 << 63))),
    "twice": pair(b"a", U8, b"\1") + pair(b"a", U8, b"\1"),
    "alignment-0": pair(b"general.alignment", U32, u32(0)),
    "alignment-1": pair(b"general.alignment", U32, u32(1)),
    "alignment-3": pair(b"general.alignment", U32, u32(3)),
    "alignment-2-31": pair(b"general.alignment", U32, u32(1 << 31)),
    "alignment-text": pair(b"general.alignment", STRING, text(b"32")),
    "alignment-array": pair(b"general.alignment", ARRAY, array(U32, 1, u32(32))),
    "architecture-number": pair(b"general.architecture", U32, u32(35)),
    "architecture-other": pair(b"general.architecture", STRING, text(b"llama")),
    "architecture-array": pair(b"general.architecture", ARRAY, array(STRING, 1, text(b"qwen35"))),
    "architecture-alone": pair(b"general.architecture", STRING, text(b"qwen35")),
}
TENSORS = {
    "name-empty": tensor(b""),
    "name-long": tensor(b"x" * 64),
    "name-length-huge": text(b"", HUGE),
    "name-not-utf-8": tensor(b"\xff"),
    "name-escape": tensor(b"\x1b[2J"),
    "name-path": tensor(b"../../x"),
    "dims-5": tensor(b"a", (1,) * 5),
    "dims-huge": tensor(b"a", dims=0xFFFFFFFF),
    "size-0": tensor(b"a", (0,)),
    "size-huge": tensor(b"a", (HUGE,)),
    "size-2-63": tensor(b"a", (1 << 63, 2)),
    "size-product": tensor(b"a", (1 << 40,) * 4),
    "kind-unknown": tensor(b"a", kind=99),
    "kind-removed": tensor(b"a", kind=4),
    "kind-huge": tensor(b"a", kind=0xFFFFFFFF),
    "offset-huge": tensor(b"a", offset=HUGE),
    "offset-odd": tensor(b"a", offset=1),
    "offset-later": tensor(b"a", offset=32),
    "offset-past-the-end": tensor(b"a", offset=1 << 40),
    "block-cut": tensor(b"a", (31,), kind=8),
    "block-scalar": tensor(b"a", (), kind=8),
}


def _u(value: int) -> Kv:
    return Kv("", "uint32", value)


KEYS: dict[str, dict[str, Kv | None]] = {
    "blocks-0": {"block_count": _u(0)},
    "blocks-1025": {"block_count": _u(1025)},
    "blocks-4-billion": {"block_count": _u(0xFFFFFFFF)},
    "blocks-absent": {"block_count": None},
    "blocks-text": {"block_count": Kv("", "string", "2")},
    "blocks-3": {"block_count": _u(3)},
    "width-0": {"embedding_length": _u(0)},
    "width-other": {"embedding_length": _u(97)},
    "width-float": {"embedding_length": Kv("", "float32", 96.0)},
    "heads-0": {"attention__head_count": _u(0)},
    "heads-kv-3": {"attention__head_count_kv": _u(3)},
    "heads-array-short": {"attention__head_count_kv": Kv("", "array[int32]", [2])},
    "heads-array-zeros": {"attention__head_count_kv": Kv("", "array[int32]", [0, 0])},
    "heads-array-texts": {"attention__head_count_kv": Kv("", "array[string]", ["2", "2"])},
    "heads-array-floats": {"attention__head_count_kv": Kv("", "array[float32]", [2.0, 2.0])},
    "eps-nan": {"attention__layer_norm_rms_epsilon": Kv("", "float32", float("nan"))},
    "eps-inf": {"attention__layer_norm_rms_epsilon": Kv("", "float32", float("inf"))},
    "eps-0": {"attention__layer_norm_rms_epsilon": Kv("", "float32", 0.0)},
    "theta-inf": {"rope__freq_base": Kv("", "float32", float("inf"))},
    "theta-negative": {"rope__freq_base": Kv("", "float32", -1.0)},
    "rope-0": {"rope__dimension_count": _u(0)},
    "rope-odd": {"rope__dimension_count": _u(7)},
    "rope-wide": {"rope__dimension_count": _u(64)},
    "sections-text": {"rope__dimension_sections": Kv("", "string", "2,1,1,0")},
    "sections-negative": {"rope__dimension_sections": Kv("", "array[int32]", [-1, 1, 1, 0])},
    "sections-short": {"rope__dimension_sections": Kv("", "array[int32]", [2])},
    "scaling": {"rope__scaling__type": Kv("", "string", "yarn")},
    "scaling-number": {"rope__scaling__type": _u(1)},
    "recurrent-short": {"attention__recurrent_layers": Kv("", "array[bool]", [True])},
    "recurrent-numbers": {"attention__recurrent_layers": Kv("", "array[int32]", [5, 6])},
    "recurrent-scalar": {"attention__recurrent_layers": Kv("", "bool", value=True)},
    "mtp-all": {"nextn_predict_layers": _u(2)},
    "mtp-huge": {"nextn_predict_layers": _u(1 << 31)},
    "vocabulary-other": {"vocab_size": _u(299)},
    "inner-0": {"ssm__inner_size": _u(0)},
    "inner-other": {"ssm__inner_size": _u(97)},
    "state-other": {"ssm__state_size": _u(8)},
    "kernel-huge": {"ssm__conv_kernel": _u(1 << 30)},
}


def cases() -> Iterator[Case]:
    """Yield every case of this kind."""
    for name, content in STARTS.items():
        yield _case(f"start-{name}", harm_file(FILE, content))
    for name, content in COUNTS.items():
        yield _case(f"count-{name}", harm_file(FILE, content))
    for name, part in PAIRS.items():
        content = head([part], num_pairs=2 if name == "twice" else 1)
        yield _case(f"pair-{name}", harm_file(FILE, content))
    for name, part in TENSORS.items():
        yield _case(f"tensor-{name}", harm_file(FILE, head((), [part], data=32)))
    for name, changes in KEYS.items():
        yield _case(f"key-{name}", harm_pairs(**changes))
    yield from _tensors_changed()
    yield from _files()


def _case(name: str, harm: Harm, source: str = FILE, **more: Any) -> Case:
    return Case("gguf", name, harm, source=source, **more)


def _tensors_changed() -> Iterator[Case]:
    def harm(change: Any) -> Harm:
        def apply(folder: Path) -> None:
            pairs, infos = good()
            write(folder / FILE, pairs, change(infos))

        return apply

    named = "blk.0.ffn_up.weight"
    changes = {
        "missing": lambda infos: [i for i in infos if i.name != named],
        "renamed": lambda infos: [changed(i, name="x") if i.name == named else i for i in infos],
        "swapped": lambda infos: [
            changed(i, shape=i.shape[::-1]) if i.name == named else i for i in infos
        ],
        "integers": lambda infos: [
            changed(i, dtype="I32") if i.name == named else i for i in infos
        ],
        "no-vocabulary": lambda infos: [i for i in infos if i.name != "token_embd.weight"],
        "extra": lambda infos: [*infos, TensorInfo("blk.9.ffn_up.weight", "F32", (1,))],
    }
    for name, change in changes.items():
        yield _case(f"tensors-{name}", harm(change))


def _files() -> Iterator[Case]:
    def cut(nbytes: int) -> Harm:
        def apply(folder: Path) -> None:
            pairs, infos = good()
            write(folder / FILE, pairs, infos)
            os.truncate(folder / FILE, (folder / FILE).stat().st_size + nbytes)

        return apply

    def split(name: str) -> Harm:
        return lambda folder: write(folder / name, *good())

    yield _case("file-cut", cut(-32))
    yield _case("file-halved", cut(-60_000))
    yield _case("file-longer", cut(1))
    yield _case("file-a-gib-longer", cut(1 << 30))
    yield _case("file-absent", lambda folder: None)
    yield _case("file-is-a-folder", lambda folder: (folder / FILE).mkdir())
    yield _case("file-is-a-fifo", lambda folder: os.mkfifo(folder / FILE))
    for name in (
        "m-00001-of-00002.gguf",
        "m-00003-of-00002.gguf",
        "m-00000-of-00000.gguf",
        "m-00001-of-99999.gguf",
    ):
        yield _case(f"split-{name[2:-5]}", split(name), source=name)
    for name, count in (("a-hundred-thousand", 100_000), ("four-million", 1 << 22)):
        words = pair(b"general.architecture", ARRAY, array(STRING, count, bytes(8 * count)))
        yield _case(f"pair-{name}-words", harm_file(FILE, head([words])), memory=96 << 20)
