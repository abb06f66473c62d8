"""Fields of config.json that stand in several places, or that only together mean something.

    layers     layer_types, or full_attention_interval; engines read the one or the other
    rope       rope_parameters, rope_scaling, or the same fields beside them
    types      dtype, torch_dtype, of the whole and of its parts
    mtp        mtp_num_hidden_layers, which also the tensors know
    records    those that transformers takes only of one type
    ties       tie_word_embeddings, of the whole and of its text part

Engines differ in the place that they read, so every place must say what the source's fields come
to: transformers lets rope_scaling win over rope_parameters, vLLM a rope_theta beside the block,
mlx-lm reads the interval alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.config import Config
from formats.family.config_fields import DEFAULT_INTERVAL, interval_types
from formats.family.rope import KINDS, LONGEST, ORIGINAL, read_rope
from qwen35_convert.containers.safetensors.config_table import NEUTRAL, RECORD_TYPES
from qwen35_convert.difference import ABSENT, differences, first, rounded, same

Part = tuple[str, Mapping[str, Any]]
ROPE_BLOCKS = ("rope_parameters", "rope_scaling")
ROPE_FIELDS = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
ROPE_TYPES = ("rope_type", "type")
# What transformers takes into a block that lacks it, from beside the block.
FILLING = ("rope_theta", "partial_rotary_factor")
PLAIN_ROPE = ("default", "mrope")
TYPE_FIELDS = ("dtype", "torch_dtype")
OF_TORCH = "torch."
TORCH_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def places(config: Config) -> list[Part]:
    """Return the parts of a config that may speak of the text model, each with its prefix."""
    text = [("text_config.", config.text)] if config.nested else []
    return [("", config.raw), *text]


def layer_differences(artifact: Checkpoint, source: Checkpoint) -> Iterator[str]:
    """Compare which layers attend, by their list and by their interval."""
    ours, theirs = artifact.config, source.config
    expected = list(theirs.layer_types)
    yield from first(differences(list(ours.layer_types), expected, "layer_types", rounded))
    for prefix, part in places(ours):
        stated = part.get("layer_types")
        if stated is not None and part is not ours.text:
            yield from first(differences(stated, expected, f"{prefix}layer_types", rounded))
        yield from _interval(prefix, part, theirs, needed=part is ours.text)


def _interval(
    prefix: str, part: Mapping[str, Any], theirs: Config, *, needed: bool
) -> Iterator[str]:
    field = "full_attention_interval"
    got = ABSENT if part.get(field) is None else part[field]
    parts = (theirs.text, theirs.raw)
    wanted = next((p[field] for p in parts if p.get(field) is not None), ABSENT)
    if same(got, wanted) or (got is ABSENT and not needed):
        return
    interval = DEFAULT_INTERVAL if got is ABSENT else got
    types = theirs.layer_types
    if (
        not isinstance(interval, int)
        or interval < 1
        or interval_types(interval, len(types)) != types
    ):
        yield from differences(got, wanted, prefix + field)


def rope_differences(artifact: Checkpoint, source: Checkpoint) -> Iterator[str]:
    """Compare what the rotary fields come to, wherever an engine reads them."""
    text, ours = source.config.text, artifact.config.text
    stated: Mapping[str, Any] = next((text[b] for b in ROPE_BLOCKS if text.get(b)), {})
    expected = _worked_out(_rope_fields(text, stated), text)
    for prefix, part in places(artifact.config):
        whole = part is ours
        if _stated(part) != _stated(text if whole else source.config.raw):
            yield from _rope_at(prefix, part, expected, whole=whole)


def _stated(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary fields word for word."""
    return {key: part.get(key) for key in (*ROPE_BLOCKS, *ROPE_FIELDS, *ROPE_TYPES)}


def _rope_at(
    prefix: str, part: Mapping[str, Any], expected: Mapping[str, Any], *, whole: bool
) -> Iterator[str]:
    """Compare the blocks of a part and the fields beside them; `whole`: no other part has more."""
    blocks = {name: part[name] for name in ROPE_BLOCKS if part.get(name)}
    filling = {key: part[key] for key in FILLING if whole and key in part}
    for name, block in blocks.items():
        if isinstance(block, dict):
            for key in ROPE_TYPES:
                if key in block and block[key] is None:
                    yield from differences(None, PLAIN_ROPE[0], f"{prefix}{name}.{key}")
            got = _rope_fields(filling, block)
            got = _worked_out(got, part) if whole else got
            yield from _rope_of(got, expected, f"{prefix}{name}.", whole=whole)
        else:
            yield from differences(block, expected, f"{prefix}{name}")
    if whole and not blocks:
        got = _rope_fields(filling, {})
        yield from _rope_of(got, expected, f"{prefix}{ROPE_BLOCKS[0]}.", whole=True)
    yield from _rope_of(_rope_fields(part, {}), expected, prefix, whole=False)


def _rope_of(
    got: Mapping[str, Any], expected: Mapping[str, Any], prefix: str, *, whole: bool
) -> Iterator[str]:
    """Compare the fields that are stated, and where they are the whole also those that are not."""
    for key in dict.fromkeys((*expected, *got)) if whole else got:
        pair = got.get(key, ABSENT), expected.get(key, ABSENT)
        yield from first(differences(*pair, prefix + key, rounded))


def _rope_fields(part: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary fields in one spelling: those of the block, else those beside it."""
    beside = {key: part[key] for key in (*ROPE_FIELDS, *ROPE_TYPES) if part.get(key) is not None}
    fields = beside | {key: value for key, value in block.items() if value is not None}
    kinds = [fields.pop(key) for key in ROPE_TYPES if key in fields]
    scaled = next((kind for kind in kinds if kind not in PLAIN_ROPE), None)
    ordered = {key: fields.pop(key) for key in ROPE_FIELDS if key in fields}
    ordered |= {"rope_type": scaled} | fields
    result = {key: value for key, value in ordered.items() if value not in NEUTRAL}
    return {key: float(v) if type(v) is int else v for key, v in result.items()}


def _worked_out(fields: dict[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a scaled rope with what absent ones come to beside this text config."""
    lengths = {key: text[key] for key in (LONGEST, ORIGINAL) if text.get(key) is not None}
    block = {k: int(v) if k == ORIGINAL else v for k, v in fields.items()}
    try:
        scaling = read_rope(lengths | {ROPE_BLOCKS[0]: block}, "").scaling
    except (FormatError, ValueError, TypeError):
        return fields  # compared as it stands
    if scaling is None:
        return fields
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in scaling.as_dict().items()}
    return {k: v for k, v in fields.items() if k not in KINDS[scaling.kind]} | plain


def type_differences(artifact: Checkpoint, source: Checkpoint) -> Iterator[str]:
    """Compare the types that engines compute in; a wider one than the source's loses nothing.

    transformers takes no "torch." before a type, as old configs have it.
    """
    ours, theirs = _types(artifact.config), _types(source.config)
    quantized = any(atom.quantized for atom in artifact.layout.atoms.values())
    stored = artifact.layout.atoms.get("embed_tokens")
    right = {name for said in theirs.values() for name in (said, said.removeprefix(OF_TORCH))}
    right |= {TORCH_TYPES.get(stored.dtype, "")} if stored else set()
    right |= set() if quantized else {"float32"}
    expected = next(iter(theirs.values()), "bfloat16")
    for path, got in ours.items():
        if got not in right:
            yield from differences(got, expected, path)
    if theirs and not ours:
        yield from differences(ABSENT, expected, "dtype")


def _types(config: Config) -> dict[str, Any]:
    """Return every type that a config states, by its place."""
    parts = [*places(config), ("vision_config.", config.vision or {})]
    return {
        prefix + field: str(part[field])
        for prefix, part in parts
        for field in TYPE_FIELDS
        if part.get(field) is not None
    }


def mtp_differences(artifact: Checkpoint, source: Checkpoint) -> Iterator[str]:
    """Compare the MTP layers that are promised: as many as are stored, or as the source has."""
    field = "mtp_num_hidden_layers"
    expected = source.config.mtp_layers
    for prefix, part in places(artifact.config):
        got = part.get(field)
        stored = artifact.layout.form.mtp_layers
        if got is not None and not same(got, expected) and not same(got, stored):
            yield from differences(got, expected, prefix + field)


def tie_differences(artifact: Checkpoint, source: Checkpoint) -> Iterator[str]:
    """Name a tie flag that is lost: the class that reads this place would make a head of its own.

    Flags that are there must be what the tensors say, whatever the source says.
    """
    field = "tie_word_embeddings"
    flags = dict(places(source.config))
    for prefix, part in places(artifact.config):
        of_source = flags.get(prefix, source.config.text).get(field)
        if artifact.layout.tied and part.get(field) is None and of_source:
            yield from differences(ABSENT, of_source, prefix + field)


def record_differences(artifact: Checkpoint, source: Checkpoint) -> Iterator[str]:
    """Name records of a type that transformers refuses, but as the source has them; no class."""
    ours, theirs = artifact.config, source.config
    if ours.nested and not ours.text.get("model_type", True):
        expected = theirs.text.get("model_type", ABSENT)
        yield from differences(ours.text["model_type"], expected, "text_config.model_type")
    inner = "text_config." if ours.nested else ""
    parts = [(inner, ours.text, theirs.text)]
    parts += [("vision_config.", ours.vision, theirs.vision or {})] if ours.vision else []
    for prefix, part, of_source in parts:
        for key, (types, expected) in RECORD_TYPES.items():
            got = part.get(key, ABSENT)
            known = got is ABSENT or type(got) in types
            if not known and not same(got, of_source.get(key, ABSENT)):
                yield f"{prefix}{key} is {got!r:.80}, expected {expected}"


RULES = (
    layer_differences,
    rope_differences,
    type_differences,
    mtp_differences,
    record_differences,
    tie_differences,
)
