"""How a GGUF file differs from what its source gives: keys and values, tensors.

With the recipe at hand the whole header is expected to the byte. Without it, the keys that engines
obey (the architecture's and the tokenizer's) must be those that the source's config and tokenizer
give; keys that name the model or its maker may be others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.gguf.checkpoint import first_file
from formats.gguf.file import GgufFile, Kv
from formats.gguf.header import parse_header
from formats.gguf.metadata import text_metadata
from formats.gguf.tokenizer import tokenizer_metadata
from qwen35_convert.containers.gguf.mmproj import read_generation
from qwen35_convert.difference import ABSENT, differences, first, misplaced, near
from qwen35_convert.failure import Failure

# Keys that say where a file came from; nothing is computed from them.
RECORDS = ("general.", "quantize.", "split.")
# Keys under RECORDS that are obeyed after all.
OBEYED = ("general.architecture", "general.type", "general.alignment")
# What engines take a key to be that is absent.
DEFAULTS: dict[str, Any] = {"tokenizer.ggml.add_eos_token": False}
TITLE = "general.name"  # the name of the source's folder, which may have been moved


def header_differences(path: Path, expected: bytes) -> Iterator[str]:
    """Yield how keys, values and tensors differ from those of the expected header."""
    head, file = parse_header(path.name, memoryview(expected)), GgufFile(path)
    keys = _plain(file.kv), _plain(head.kv)
    for pairs in keys:
        pairs.pop(TITLE, None)
    yield from first(_by_key(*keys))
    tensors = [
        {n: [i.dtype, list(i.shape)] for n, i in infos.items()}
        for infos in (file.infos, head.infos)
    ]
    yield from list(first(_by_key(*tensors))) or misplaced(*map(list, tensors))


def _by_key(got: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Compare values by whole keys, which hold dots of their own."""
    for key in dict.fromkeys((*expected, *got)):
        pair = got.get(key, ABSENT), expected.get(key, ABSENT)
        yield from first(differences(*pair, key, near), 3)


def _plain(kv: Mapping[str, Kv]) -> dict[str, Any]:
    return {key: kv[key].value for key in kv}


def config_differences(artifact: Checkpoint, source: Checkpoint) -> Iterator[Failure]:
    """Yield keys that engines obey and that are not what the source gives."""
    file = first_file(artifact)
    try:
        expected = _expected(artifact, source)
    except FormatError as error:
        yield Failure("SOURCE", f"gives no GGUF metadata to compare with: {error}")
        return
    got = {key: value for key, value in _plain(file.kv).items() if _obeyed(key)}
    for sentence in first(_by_key(DEFAULTS | got, DEFAULTS | expected), 20):
        yield Failure(file.path.name, sentence)


def _expected(artifact: Checkpoint, source: Checkpoint) -> dict[str, Any]:
    text = text_metadata(
        source.config,
        about={},
        file_type=0,
        mtp_layers=artifact.layout.form.mtp_layers,
        generation=read_generation(source),
    )
    tokens = tokenizer_metadata(source.side, source.config.sizes["V"], source.config.raw)
    return {kv.key: kv.value for kv in (*text, *tokens) if _obeyed(kv.key)}


def _obeyed(key: str) -> bool:
    return key in OBEYED or not key.startswith(RECORDS)
