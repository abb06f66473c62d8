"""The card of a GGUF file, which has none inside: from its receipt and from its own keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.checkpoint import Checkpoint
from formats.gguf.checkpoint import first_file
from formats.gguf.header import Kv
from qwen35_convert.card.card import About, make_card
from qwen35_convert.serving.artifact import served

# Front matter: the key under `general.`
KEYS = {
    "license": "license",
    "license_name": "license.name",
    "license_link": "license.link",
    "language": "languages",
    "tags": "tags",
}
PLAIN = ("F32", "F16", "BF16")


def card_of_gguf(
    opened: Checkpoint, receipt: Mapping[str, Any], name: str, *, mmproj: str | None = None
) -> bytes:
    """Return the card of a GGUF file beside which a receipt of this name lies.

    mmproj  name of the file with its vision tower
    """
    keys = first_file(opened).kv
    infos = opened.infos().values()
    return make_card(
        About(
            title=str(_value(keys, "name") or opened.name),
            receipt=receipt,
            infos=infos,
            quantized=any(info.dtype not in PLAIN for info in infos),
            vision=receipt["recipe"].get("vision") == "keep",
            library="gguf",
            receipt_name=name,
            front={key: _value(keys, own) for key, own in KEYS.items()},
            served=served(opened, first_file(opened).path.name, mmproj=mmproj),
        )
    )


def _value(keys: Mapping[str, Kv], key: str) -> Any:
    pair = keys.get(f"general.{key}")
    return None if pair is None else pair.value
