"""Fuzzing of GGUF files: `python -m tests.fuzz.fuzz_gguf --seconds 600`.

Every value of an accepted file is decoded, its config resolved and its tokenizer's files made.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from formats.errors import FormatError
from formats.family.config import read_config
from formats.gguf.config import config_from_metadata
from formats.gguf.cursor import NAMES
from formats.gguf.file import GgufFile
from formats.gguf.tokenizer_files import tokenizer_files
from tests.fuzz.loop import main

FOLDER = tempfile.TemporaryDirectory()
FILE = Path(FOLDER.name) / "x.gguf"
MODULES = (
    "formats.gguf.cursor",
    "formats.gguf.header",
    "formats.gguf.file",
    "formats.gguf.keys",
    "formats.gguf.metadata",
    "formats.gguf.tokenizer_files",
    "formats.gguf.tokenizer_json",
    "formats.family.config",
)
WORDS = (
    *(i.to_bytes(4, "little") for i in range(len(NAMES) + 1)),
    b"GGUF\3\0\0\0",
    b"general.alignment",
    b"general.architecture",
    b"qwen35",
    b"qwen35moe",
    b"qwen35.block_count",
    b"qwen35.attention.recurrent_layers",
    b"qwen35.rope.dimension_sections",
    b"tokenizer.ggml.model",
    b"gpt2",
    b"tokenizer.ggml.tokens",
    b"tokenizer.ggml.token_type",
    b"tokenizer.ggml.merges",
    b"token_embd.weight",
    b"\0" * 8,
    b"\xff" * 8,
)


def TestOneInput(data: bytes) -> None:
    """Open a file and ask it for everything that a conversion asks for."""
    FILE.write_bytes(data)
    try:
        file = GgufFile(FILE)
        for start, stop in file.ranges.values():
            assert 0 <= start <= stop <= len(data)
        for key in file.kv:
            assert file.kv[key].key == key
        read_config(config_from_metadata(file.kv, file.infos))
        tokenizer_files(file.kv)
    except FormatError:
        return


if __name__ == "__main__":
    main("gguf", MODULES, TestOneInput, WORDS)
