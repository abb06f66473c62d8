"""An inspection on one screen: what a reader asks first; `--json` has every figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from qwen35_convert.sizes import size_text

if TYPE_CHECKING:
    from qwen35_convert.inspection.inspect import Inspection

COLUMN = 12


def lines(inspection: Inspection) -> Iterator[str]:
    """Yield what a checkpoint holds, how large its parts are, and how to serve it."""
    for name, text in _rows(inspection):
        yield f"{name:<{COLUMN - 1}} {text}"


def _rows(inspection: Inspection) -> Iterator[tuple[str, str]]:
    quantization = inspection.quantization or "not quantised"
    yield "layout", f"{inspection.layout}, {inspection.kind}, {quantization}"
    if inspection.kv_cache:
        yield "kv cache", inspection.kv_cache
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in inspection.dtypes.items())
    yield "tensors", f"{inspection.tensors} ({dtypes})"
    yield "parameters", f"{inspection.parameters:,} in {size_text(inspection.bytes)}"
    experts = f" ({inspection.mtp['experts']} experts)" if inspection.mtp["experts"] else ""
    layers = inspection.mtp["layers"]
    yield "mtp", f"{layers} layer{'' if layers == 1 else 's'}{experts}"
    yield "vision", "yes" if inspection.vision else "no"
    yield from _shape(inspection.config)
    if inspection.serving:
        yield from _serving(inspection.serving)


def _shape(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the sizes of the text model."""
    kinds = config["linear_attention_layers"], config["full_attention_layers"]
    yield (
        "layers",
        f"{config['num_hidden_layers']} of width {config['hidden_size']}: "
        f"{kinds[0]} with the delta rule, {kinds[1]} with attention",
    )
    yield (
        "heads",
        f"attention: {config['num_attention_heads']} query, {config['num_key_value_heads']} "
        f"key-value, {config['head_dim']} wide; delta rule: {config['linear_num_key_heads']} key, "
        f"{config['linear_key_head_dim']} wide, {config['linear_num_value_heads']} value, "
        f"{config['linear_value_head_dim']} wide",
    )
    if "num_experts" in config:
        yield (
            "experts",
            f"{config['num_experts']}, {config['moe_intermediate_size']} wide, "
            f"{config['num_experts_per_tok']} for each token; a shared one, "
            f"{config['shared_expert_intermediate_size']} wide",
        )
    else:
        yield "mlp", str(config["intermediate_size"])
    yield "rope", _rope(config)
    tied = "tied to the embedding" if config["tie_word_embeddings"] else "a head of its own"
    yield "vocabulary", f"{config['vocab_size']}, {tied}"


def _rope(config: Mapping[str, Any]) -> str:
    kind = f"{config['rope_type']}, " if "rope_type" in config else ""
    part = config["partial_rotary_factor"]
    return f"{kind}theta {config['rope_theta']:.0f}, {part:g} of a head rotated"


def _serving(serving: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a token and a sequence take, and a command for each engine."""
    blocks = ", ".join(f"{n} ({kind})" for kind, n in serving["attention_block_size"].items())
    yield (
        "memory",
        f"{serving['kv_bytes_per_token']:,} bytes a token, "
        f"{serving['state_bytes_per_sequence']:,} a sequence",
    )
    if serving["vllm"]:
        yield "ranks", f"tensor parallel up to {serving['max_tensor_parallel']}"
        yield "blocks", f"of vLLM's cache, in tokens: {blocks}; an estimate, its log has the value"
    for engine in serving["engines"]:
        yield engine["engine"], _short(engine)
    versions = [engine["least"] for engine in serving["engines"] if engine["least"]]
    if versions:
        yield "versions", f"{', '.join(versions)} or newer"
    if "memory" in serving:
        yield from _needed(serving["memory"])


def _short(engine: Mapping[str, Any]) -> str:
    return engine["line"] or f"no: {engine['cannot']}"


def _needed(memory: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what so many sequences take in each engine, and what fits."""
    yield (
        "serving",
        f"{memory['batch']:,} x {memory['context']:,} tokens; activations and the engine's own "
        "memory are not counted",
    )
    for name, engine in memory["engines"].items():
        total, cache = size_text(engine["total_bytes"]), size_text(engine["cache_bytes"])
        text = f"{total}, {cache} of it cache"
        if memory["memory_bytes"] is not None:
            text += f"; {size_text(memory['memory_bytes'])} {_room(memory, engine)}"
        yield f"  {name}", text


def _room(memory: Mapping[str, Any], engine: Mapping[str, Any]) -> str:
    """Return what fits: a length at this batch, a batch at this length."""
    length, batch = engine["longest_context"], engine["largest_batch"]
    fitting = [f"{memory['batch']:,} x {length:,}"] if length else []
    fitting += [f"{batch:,} x {memory['context']:,}"] if batch else []
    return f"hold {' or '.join(fitting)}" if fitting else "is too little"


def start_lines(serving: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield all that is known of one engine."""
    for key, text in _start_rows(serving, name):
        yield f"{key:<{COLUMN - 1}} {text}"


def _start_rows(serving: Mapping[str, Any], name: str) -> Iterator[tuple[str, str]]:
    engine = next((one for one in serving["engines"] if one["engine"] == name), None)
    if engine is None:
        yield name, "nothing is known of this engine and such an artifact"
    elif engine["cannot"]:
        yield name, f"no: {engine['cannot']}"
    else:
        yield name, f"{engine['least']} or newer" if engine["least"] else "no version is known"
        yield from (("serve", line) for line in engine["serve"])
        yield from (("draft", line) for line in engine["draft"])
        if name == "vllm":
            yield from (("lmcache", serving[key]) for key in ("lmcache", "vllm_with_lmcache"))
        yield from (("note", note) for note in engine["notes"])
