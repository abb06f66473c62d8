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
        yield f"{name:<{COLUMN}}{text}"


def _rows(inspection: Inspection) -> Iterator[tuple[str, str]]:
    quantization = inspection.quantization or "not quantised"
    yield "layout", f"{inspection.layout}, {inspection.kind}, {quantization}"
    if inspection.kv_cache:
        yield "kv cache", inspection.kv_cache
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in inspection.dtypes.items())
    yield "tensors", f"{inspection.tensors} ({dtypes})"
    yield "parameters", f"{inspection.parameters:,} in {size_text(inspection.bytes)}"
    experts = f" ({inspection.mtp['experts']} experts)" if inspection.mtp["experts"] else ""
    yield "mtp", f"{inspection.mtp['layers']} layers{experts}"
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
        f"attention {config['num_attention_heads']} on {config['num_key_value_heads']} of "
        f"{config['head_dim']}; delta rule {config['linear_num_key_heads']} keys of "
        f"{config['linear_key_head_dim']}, {config['linear_num_value_heads']} values of "
        f"{config['linear_value_head_dim']}",
    )
    if "num_experts" in config:
        yield (
            "experts",
            f"{config['num_experts']} of {config['moe_intermediate_size']}, "
            f"{config['num_experts_per_tok']} for a token, and a shared one of "
            f"{config['shared_expert_intermediate_size']}",
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
    """Yield what a token and a sequence take, and the commands."""
    blocks = ", ".join(f"{n} ({kind})" for kind, n in serving["attention_block_size"].items())
    yield (
        "memory",
        f"{serving['kv_bytes_per_token']:,} bytes a token, "
        f"{serving['state_bytes_per_sequence']:,} a sequence",
    )
    yield "ranks", f"tensor parallel up to {serving['max_tensor_parallel']}"
    yield "blocks", f"of vLLM's cache, in tokens: {blocks}; an estimate, its log has the value"
    yield "vllm", serving["vllm"]
    yield "lmcache", serving["lmcache"]
