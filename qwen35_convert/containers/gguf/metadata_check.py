"""The metadata of a GGUF file that no recipe is known of: against its source, or by themselves.

Every key that llama.cpp obeys must say what the source's config and tokenizer say, in any way that
llama.cpp reads alike. Without a source, what the file says of its sizes is held against itself: a
key that no model of the family has is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from formats.chat_template import DEFAULT, PLACES
from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.config_fields import DEFAULT_INTERVAL, LAYER_TYPES, interval_types
from formats.gguf.checkpoint import first_file
from formats.gguf.header import Kv
from formats.gguf.metadata import text_metadata
from formats.gguf.obeyed import ABSENT_IN_TEXT, SAMPLING, TOKEN_TEXTS, of_arch
from formats.gguf.pooling import KEY as POOLING
from formats.gguf.pooling import TYPES as POOLINGS
from formats.gguf.pooling import pooling_type
from formats.gguf.tokenizer import tokenizer_metadata
from qwen35_convert.containers.gguf.file_type import file_type_failures
from qwen35_convert.containers.gguf.keys import Reading, key_differences
from qwen35_convert.containers.gguf.mmproj import read_generation
from qwen35_convert.difference import first
from qwen35_convert.failure import Failure

MOST = 20
TOKENS = "tokenizer.ggml.tokens"
BOS = "tokenizer.ggml.bos_token_id"
TEMPLATE = "tokenizer.chat_template"


def config_differences(artifact: Checkpoint, source: Checkpoint) -> Iterator[Failure]:
    """Yield keys that engines obey and that are not what the source gives."""
    file = first_file(artifact)
    try:
        expected = _text(artifact, source, pooling_type(source.sides)) | _tokenizer(source)
    except FormatError as error:
        yield Failure("SOURCE", f"gives no GGUF metadata to compare with: {error}")
        return
    others = _sizes(source, expected) | _tokens(source, expected)
    yield from _compare(artifact, file.kv, expected, others)
    yield from file_type_failures(artifact)


def own_differences(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield keys beside those of the tokenizer that contradict the others, or that none has."""
    file = first_file(artifact)
    own = {k: file.kv[k] for k in file.kv if not k.startswith(("tokenizer.", SAMPLING))}
    try:
        expected = _text(artifact, artifact, _own_pooling(own, artifact))
    except FormatError as error:
        yield Failure(file.path.name, str(error))
        return
    yield from _compare(artifact, own, expected, _sizes(artifact, expected))


def _compare(
    artifact: Checkpoint,
    got: Mapping[str, Kv],
    expected: Mapping[str, Kv],
    others: Mapping[str, tuple[Any, ...]],
) -> Iterator[Failure]:
    arch = str(got["general.architecture"].value)
    reading = Reading(arch, of_arch(ABSENT_IN_TEXT, arch), others)
    implied = _kinds(artifact, arch)
    sentences = key_differences({implied.key: implied, **got}, expected, reading)
    for sentence in first(sentences, MOST):
        yield Failure(first_file(artifact).path.name, sentence)


def _kinds(artifact: Checkpoint, arch: str) -> Kv:
    """Return what `recurrent_layers` would be: older writers give the interval alone."""
    kinds = [kind == LAYER_TYPES[0] for kind in artifact.config.layer_types]
    kinds += [False] * artifact.layout.form.mtp_layers
    return Kv(f"{arch}.attention.recurrent_layers", "array[bool]", kinds)


def _own_pooling(kv: Mapping[str, Kv], artifact: Checkpoint) -> int | None:
    """Return the number that the file itself gives, if it is one of an embedding model."""
    arch = "qwen35moe" if artifact.config.moe else "qwen35"
    pair = kv.get(f"{arch}.{POOLING}")
    return pair.value if pair and pair.value in POOLINGS.values() else None


def _text(artifact: Checkpoint, source: Checkpoint, pooling: int | None) -> dict[str, Kv]:
    pairs = text_metadata(
        source.config,
        about={},
        file_type=0,
        mtp_layers=artifact.layout.form.mtp_layers,
        generation=read_generation(source),
        pooling=pooling,
    )
    return {kv.key: kv for kv in pairs}


def _tokenizer(source: Checkpoint) -> dict[str, Kv]:
    metadata = tokenizer_metadata(source.sides, source.config.sizes["V"], source.config.raw)
    return {kv.key: kv for kv in metadata.pairs}


def _sizes(source: Checkpoint, expected: Mapping[str, Kv]) -> dict[str, tuple[Any, ...]]:
    """Return what else is right under keys of the architecture.

    llama.cpp writes an interval of 4 where config.json has none, whatever the layers are.
    """
    types, text = source.config.layer_types, source.config.text
    arch = expected["general.architecture"].value
    count = len(types)
    intervals = [n for n in range(1, count + 2) if interval_types(n, count) == types]
    intervals += [DEFAULT_INTERVAL] if text.get("full_attention_interval") is None else []
    unread = text.get("intermediate_size") if source.config.moe else None
    return {
        f"{arch}.full_attention_interval": tuple(intervals),
        f"{arch}.vocab_size": (source.config.sizes["V"],),
        f"{arch}.rope.scaling.original_context_length": (expected[f"{arch}.context_length"].value,),
        f"{arch}.feed_forward_length": () if unread is None else (unread,),
    }


def _tokens(source: Checkpoint, expected: Mapping[str, Kv]) -> dict[str, tuple[Any, ...]]:
    """Return what else is right under keys of the tokenizer: other names of the same tokens."""
    ids = {token: i for i, token in enumerate(expected[TOKENS].value)}
    named = {
        key: tuple(ids[text] for text in texts if text in ids) for key, texts in TOKEN_TEXTS.items()
    }
    begin = (read_generation(source) or {}).get("bos_token_id")
    texts = tuple(same for text in _templates(source) for same in (text, _as_rendered(text)))
    return named | {BOS: (begin,) if isinstance(begin, int) else (), TEMPLATE: texts}


def _as_rendered(text: str) -> str:
    """Return the other template that renders alike: Jinja drops one line end at the end."""
    bare = text.removesuffix("\n")
    return text if bare.endswith("\n") else bare if bare != text else f"{text}\n"


def _templates(source: Checkpoint) -> Iterator[str]:
    """Yield every default template: which file counts has changed among readers."""
    for _, read in PLACES:
        yield from (text for name, text in read(source.sides) if name == DEFAULT)
