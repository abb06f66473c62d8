"""How a GGUF file says what becomes of the hidden states of an embedding model: `pooling_type`.

Source: llama.cpp's `enum llama_pooling_type`, which b11549 reads for these architectures too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from formats.embedder import PROMPTS, Sides, embedder_files, pooling, pooling_modes, prompts
from formats.errors import FormatError
from formats.gguf.header import Kv

# llama.cpp's number of a mode; 0 is none, 4 the score of a reranker
TYPES = {"mean": 1, "cls": 2, "lasttoken": 3}
KEY = "pooling_type"


def pooling_type(sides: Sides) -> int | None:
    """Return llama.cpp's number, None without a pooling module. FormatError if it has none."""
    config = pooling(sides)
    if config is None:
        return None
    modes = pooling_modes(config)
    if len(modes) != 1 or modes[0] not in TYPES:
        raise FormatError(
            "the pooling config",
            f"asks for {' and '.join(modes) or 'no mode'}",
            f"one of {', '.join(TYPES)}: llama.cpp has no other",
            "convert to a folder",
        )
    return TYPES[modes[0]]


def pooling_notes(sides: Sides) -> Iterator[str]:
    """Yield what an embedding model loses in a GGUF file."""
    stated = prompts(sides)
    if stated:
        listed = ", ".join(f"{name} {text!r}" for name, text in stated.items())
        yield f"{PROMPTS}: a GGUF file holds no prompts; put them before the text: {listed:.300}"
    if (pooling(sides) or {}).get("include_prompt") is False:
        yield "include_prompt is false: llama.cpp pools over the prompt's tokens all the same"


def pooling_files(kv: Mapping[str, Kv]) -> dict[str, bytes]:
    """Return the files of an embedding model that say what the metadata say; none for others."""
    arch = kv["general.architecture"].value
    pair, width = kv.get(f"{arch}.{KEY}"), kv.get(f"{arch}.embedding_length")
    mode = next((mode for mode, n in TYPES.items() if pair and pair.value == n), None)
    return {} if mode is None or width is None else embedder_files(mode, width.value)
