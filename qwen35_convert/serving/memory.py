"""The memory that an engine takes for weights, states, keys and values; and what fits into some.

    conv, ssm, token   of one layer, as in `serving.figures`

    vLLM       pages of one size, of N tokens or one state: page = N * token
               layers share G pools, G the number of layers of the rarer kind; those of the other
               kind are ceil(layers / G) groups, which stand in the same pools
               cache = G * page * (batch * (ceil(context / N) + 2 * groups) + 1)
               2: with prefix caching, its default since 0.28, a sequence has two states; 1: an
               unused page
    SGLang     cache = batch * (states + context * tokens), at least: prefixes are kept beside
    llama.cpp  as SGLang, conv in F32, keys and values in F16, 256 tokens at a time

Not in it: activations, compiled graphs, what drafts of the MTP head take, the engine itself. vLLM
takes a share of the GPU (--gpu-memory-utilization, 0.9), SGLang too (--mem-fraction-static).

Source: vLLM 0.26, `MambaSpec.max_memory_usage_bytes` and `_get_kv_cache_groups_uniform_page_size`;
SGLang 0.5.23; llama.cpp, `llama_memory_recurrent`, held against the buffers of b11549.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from formats.family.cache_scales import has_fp8_cache
from formats.nearest import one_of
from qwen35_convert.errors import RecipeError
from qwen35_convert.serving.engines import LLAMA_CPP, SGLANG, VLLM
from qwen35_convert.serving.figures import (
    BF16,
    F32,
    FP8,
    attention_block_size,
    state_bytes,
    token_bytes,
)

if TYPE_CHECKING:
    from formats.family.config import Config

FULL, GDN = "full_attention", "linear_attention"
MOST = 1 << 40


@dataclass(frozen=True, slots=True)
class Allocation:
    """How an engine keeps what sequences leave behind.

    conv_bytes  an element of the convolution's window
    fp8_cache   whether keys and values are FP8 where the artifact has scales for them
    states      how many a sequence has
    cells       tokens of a sequence are a multiple of it
    paged       pages hold one state or N tokens, and N cells are one page
    """

    conv_bytes: int = BF16
    fp8_cache: bool = True
    states: int = 1
    cells: int = 1
    paged: bool = False


ALLOCATIONS: Mapping[str, Allocation] = {
    VLLM: Allocation(states=2, paged=True),
    SGLANG: Allocation(),
    LLAMA_CPP: Allocation(conv_bytes=F32, fp8_cache=False, cells=256),
}


@dataclass(frozen=True, slots=True)
class Needed:
    """The bytes that weights take, and sequences beside them.

    state, token  what the engine allocates for a sequence's states, for one of its tokens
    cache         of all sequences
    """

    weights: int
    state: int
    token: int
    cache: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache

    def as_dict(self) -> dict[str, Any]:
        """Return it under the names of `inspect --json`."""
        return {
            "weight_bytes": self.weights,
            "state_bytes_per_sequence": self.state,
            "kv_bytes_per_token": self.token,
            "cache_bytes": self.cache,
            "total_bytes": self.total,
        }


def memory_needed(
    config: Config, weight_bytes: int, context: int, batch: int, engine: str
) -> Needed:
    """Return what an engine needs for `batch` sequences of `context` tokens, on one device.

    weight_bytes  of the artifact
    engine        one of ALLOCATIONS

    Raises RecipeError for an engine of which that is not known, and for numbers below 1.
    """
    if engine not in ALLOCATIONS:
        raise RecipeError(f"engine {engine!r} is not known, expected {one_of(ALLOCATIONS)}")
    for name, number in (("context", context), ("batch", batch)):
        if number < 1:
            raise RecipeError(f"{name} is {number}, expected 1 or more")
    how = ALLOCATIONS[engine]
    return (_paged if how.paged else _plain)(how, config, weight_bytes, context, batch)


def _plain(how: Allocation, config: Config, weights: int, context: int, batch: int) -> Needed:
    state = how.states * config.layer_types.count(GDN) * _state(how, config)
    token = config.layer_types.count(FULL) * _token(how, config)
    cells = -(-context // how.cells) * how.cells
    return Needed(weights, state, token, batch * (state + cells * token))


def _paged(how: Allocation, config: Config, weights: int, context: int, batch: int) -> Needed:
    kv_bytes = _kv_bytes(how, config)
    block = attention_block_size(config.sizes, kv_bytes=kv_bytes)
    pools, groups = _pools(config)
    page = pools * block * _token(how, config)
    state = page * how.states * groups[GDN]
    tokens = page * -(-context // block) * groups[FULL]
    return Needed(weights, state, page * groups[FULL] // block, batch * (state + tokens) + page)


def _pools(config: Config) -> tuple[int, dict[str, int]]:
    """Return how many pools there are, and how many groups of layers of each kind share them."""
    counts = {kind: config.layer_types.count(kind) for kind in (FULL, GDN)}
    least, most = min(filter(None, counts.values())), max(counts.values())
    pools = most if most < least * 1.5 else least
    return pools, {kind: -(-count // pools) for kind, count in counts.items()}


def _kv_bytes(how: Allocation, config: Config) -> int:
    return FP8 if how.fp8_cache and has_fp8_cache(config) else BF16


def _state(how: Allocation, config: Config) -> int:
    return state_bytes(config.sizes, conv_bytes=how.conv_bytes)


def _token(how: Allocation, config: Config) -> int:
    return token_bytes(config.sizes, kv_bytes=_kv_bytes(how, config))


def longest_context(config: Config, weight_bytes: int, batch: int, engine: str, memory: int) -> int:
    """Return how long `batch` sequences may be within `memory` bytes; 0: not at all.

    At most what the model was made for, where its config says it.
    """
    stated = config.text.get("max_position_embeddings")
    limit = stated if type(stated) is int and stated > 0 else MOST

    def fits(context: int) -> bool:
        return memory_needed(config, weight_bytes, context, batch, engine).total <= memory

    return _largest(fits, limit)


def largest_batch(config: Config, weight_bytes: int, context: int, engine: str, memory: int) -> int:
    """Return how many sequences of `context` tokens fit into `memory` bytes."""

    def fits(batch: int) -> bool:
        return memory_needed(config, weight_bytes, context, batch, engine).total <= memory

    return _largest(fits, MOST)


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number up to a limit that fits, 0 if 1 does not."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def room_for_weights(config: Config, context: int, batch: int, engine: str, memory: int) -> int:
    """Return the bytes that sequences leave to the weights; negative: not even they fit."""
    return memory - memory_needed(config, 0, context, batch, engine).total
