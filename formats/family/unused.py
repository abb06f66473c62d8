"""What a checkpoint may hold beside the weights and nobody reads: buffers, and copies of weights.

A buffer is what a module computed from its config and saved by chance. Some releases of MTP heads
hold the embedding and the head a second time: the family shares them with the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from formats.family.rules import template
from formats.tensor import TensorInfo

ROTARY = ("rotary_emb", "rotary_pos_emb", "rotary_embedding")
ATTENTION = ("attn", "self_attn", "attention")
# last segment of a name, whatever is above it
BUFFERS = frozenset(
    {"inv_freq", "original_inv_freq", "cos_cached", "sin_cached", "cos_sin_cache", "freqs_cis"}
    | {"masked_bias", "causal_mask", "attention_mask", "position_ids", "num_batches_tracked"}
    | {"total_ops", "total_params", "_extra_state"}
)
# key of a name that MTP must not have: what it may be a copy of, the first that is there
COPIES = {
    "mtp.embed_tokens.weight": ("embed_tokens.weight",),
    "mtp.layers.#.embed_tokens.weight": ("embed_tokens.weight",),
    "mtp.lm_head.weight": ("lm_head.weight", "embed_tokens.weight"),
    "mtp.shared_head.head.weight": ("lm_head.weight", "embed_tokens.weight"),
    "mtp.layers.#.shared_head.head.weight": ("lm_head.weight", "embed_tokens.weight"),
}


def is_buffer(info: TensorInfo) -> bool:
    """Tell whether a tensor is a buffer: what every engine computes itself."""
    *parents, last = info.name.split(".")
    if last in BUFFERS or any(parent in ROTARY for parent in parents):
        return True
    # GPT-2's causal mask; a bias of a module that is no linear layer
    return last == "bias" and bool({*parents[-1:]} & {*ATTENTION}) and _is_mask(info)


def _is_mask(info: TensorInfo) -> bool:
    return len(info.shape) > 1 or info.dtype in ("BOOL", "U8")


def copies(held: Mapping[str, TensorInfo]) -> Iterator[tuple[str, str]]:
    """Yield what may be a copy by its header, and of what; whether it is one, its values say."""
    for hub, info in held.items():
        for original in COPIES.get(template(hub)[0], ()):
            if original in held:
                same = (held[original].dtype, held[original].shape) == (info.dtype, info.shape)
                if same:
                    yield hub, original
                break
