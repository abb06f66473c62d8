"""The header of a GGUF file as the `gguf` package writes it, with arrays packed at once.

A vocabulary has a quarter of a million tokens and as many merges, and a plan needs the header's
size: item by item the package would take seconds for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from io import BytesIO
from struct import Struct, pack
from typing import TYPE_CHECKING, Any

from formats.gguf.header import Kv
from formats.tensor import TensorInfo

if TYPE_CHECKING:
    from gguf import GGUFValueType, GGUFWriter


def written(kvs: Sequence[Kv], infos: Sequence[TensorInfo], alignment: int) -> bytes:
    """Return what the `gguf` package writes for these pairs and tensors, without padding.

    Into memory: a plan writes nothing to a disk.
    """
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFValueType
    from gguf.gguf_writer import WriterState

    writer = _writer()(None, arch="")  # it would add a key: ours is among the pairs
    writer.data_alignment = alignment
    for kv in kvs:
        kind, _, item = kv.kind.removesuffix("]").partition("[")
        item_type = GGUFValueType[item.upper()] if item else None
        writer.add_key_value(kv.key, kv.value, GGUFValueType[kind.upper()], item_type)
    for info in infos:
        ggml, held = GGMLQuantizationType[info.dtype], np.dtype(np.float32)
        writer.add_tensor_info(info.name, info.shape, held, info.nbytes, ggml)
    written = BytesIO()
    writer.fout = [written]  # type: ignore[list-item]
    writer.state = WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return written.getvalue()


@cache
def _writer() -> type[GGUFWriter]:
    """Return the package's writer, which takes long to import, with arrays packed at once."""
    from gguf import GGUFValueType, GGUFWriter

    class Writer(GGUFWriter):
        def _pack_val(
            self,
            val: Any,  # noqa: ANN401 - the package's
            vtype: GGUFValueType,
            add_vtype: bool,  # noqa: FBT001
            sub_type: GGUFValueType | None = None,
        ) -> bytes:
            if vtype is not GGUFValueType.ARRAY:
                packed: bytes = super()._pack_val(val, vtype, add_vtype, sub_type)
                return packed
            assert sub_type is not None, "an array has a kind of items"
            number = self._simple_value_packing.get(sub_type)
            items = pack(f"<{len(val)}{number}", *val) if number else _strings(val)
            return pack("<IIQ", vtype, sub_type, len(val)) + items

    return Writer


def _strings(values: Sequence[str]) -> bytes:
    length = Struct("<Q").pack
    return b"".join([length(len(text)) + text for text in map(str.encode, values)])
