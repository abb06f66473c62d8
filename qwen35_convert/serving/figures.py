"""What an engine needs to serve the model, computed from its sizes; nothing is run.

Every GDN layer keeps one state per sequence, every full-attention layer one K and V per token:

    conv  = (2*NK*DK + NV*DV) * (K - 1 + drafts) * 2 bytes       BF16, the convolution's window
    ssm   = NV*DV*DK * 4 bytes                                   F32, the recurrent state
    token = 2 * NKV*HD * 2 bytes                                 one token, one layer; FP8: * 1

vLLM puts both into pages of one size, so its block of tokens must be as long as a state is large:

    N = A * ceil((conv + ssm) / (A * token)), each of them on one rank

Source: vLLM 0.33, `_align_hybrid_block_size`.
Trap: A is the attention kernel's block: 16 for FlashAttention, 64 when vLLM prefills GDN with
FlashInfer (its default on Hopper, in the `align` mode that prefix caching needs), and other
backends round differently. So N is an estimate; the value that vLLM logs is the one that counts.

Sizes go by letter: H hidden, I intermediate, NH and NKV heads of queries and of keys, HD their
size, NK and NV linear heads of keys and of values, DK and DV their sizes, K convolution kernel,
E experts, F and S intermediate sizes of a routed and of the shared expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qwen35_convert.errors import RecipeError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

BF16, FP8, F32 = 2, 1, 4  # bytes
FLASH_ATTENTION, FLASHINFER_GDN = 16, 64  # tokens in a kernel's block
FP8_BLOCK = 128
WEIGHTS, CACHE = "weights", "cache"
NOTE = "estimate; compare with vLLM's log line: Setting attention block size to N tokens"


@dataclass(frozen=True, slots=True)
class Serving:
    """The figures for one rank of `tensor_parallel`; blocks are in tokens, by KV data type."""

    tensor_parallel: int
    state_bytes_per_sequence: int
    kv_bytes_per_token: int
    attention_block_size: Mapping[str, int]
    attention_block_size_flashinfer: Mapping[str, int]
    max_tensor_parallel: int
    max_tensor_parallel_fp8_block: int

    def as_dict(self) -> dict[str, object]:
        """Return what `inspect --json` shows under "serving"."""
        return {
            "attention_block_size": dict(self.attention_block_size),
            "attention_block_size_flashinfer_gdn": dict(self.attention_block_size_flashinfer),
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "state_bytes_per_sequence": self.state_bytes_per_sequence,
            "tensor_parallel": self.tensor_parallel,
            "max_tensor_parallel": self.max_tensor_parallel,
            "max_tensor_parallel_fp8_block": self.max_tensor_parallel_fp8_block,
            "note": f"{NOTE}; prompts shorter than N never hit the cache",
        }


def serving(
    sizes: Mapping[str, int],
    *,
    num_full_layers: int,
    num_gdn_layers: int,
    tp: int = 1,
    fp8: Collection[str] = (),
) -> Serving:
    """Return what serving the model takes on each of `tp` ranks.

    fp8  what is FP8: WEIGHTS in blocks, which narrow `max_tensor_parallel`; the CACHE that its
         config asks for, whose bytes are then shown

    Raises RecipeError if `tp` ranks cannot share the heads.
    """
    if not _splits_heads(sizes, tp):
        got = ", ".join(f"{k} {sizes[k]}" for k in ("NH", "NKV", "NK", "NV"))
        raise RecipeError(f"tensor parallel {tp} does not divide the heads: {got}")
    kinds = {"bf16": BF16, "fp8": FP8}
    blocks = {k: attention_block_size(sizes, tp=tp, kv_bytes=b) for k, b in kinds.items()}
    flashinfer = {
        k: attention_block_size(sizes, tp=tp, kv_bytes=b, kernel_block=FLASHINFER_GDN)
        for k, b in kinds.items()
    }
    cache = "fp8" if CACHE in fp8 else "bf16"
    within = {b: max_tensor_parallel(sizes, block_fp8=b) for b in (False, True)}
    return Serving(
        tensor_parallel=tp,
        state_bytes_per_sequence=num_gdn_layers * state_bytes(sizes, tp=tp),
        kv_bytes_per_token=num_full_layers * token_bytes(sizes, tp=tp, kv_bytes=kinds[cache]),
        attention_block_size=blocks,
        attention_block_size_flashinfer=flashinfer,
        max_tensor_parallel=within[WEIGHTS in fp8],
        max_tensor_parallel_fp8_block=within[True],
    )


def state_bytes(
    sizes: Mapping[str, int],
    *,
    tp: int = 1,
    conv_bytes: int = BF16,
    ssm_bytes: int = F32,
    num_drafts: int = 0,
) -> int:
    """Return the bytes of one sequence's state in one GDN layer; drafts are speculative tokens."""
    NK, NV, DK, DV = (sizes[k] for k in ("NK", "NV", "DK", "DV"))
    conv = (2 * NK * DK + NV * DV) // tp * (sizes["K"] - 1 + num_drafts) * conv_bytes
    return conv + NV // tp * DV * DK * ssm_bytes


def token_bytes(sizes: Mapping[str, int], *, tp: int = 1, kv_bytes: int = BF16) -> int:
    """Return the bytes of one token's K and V in one full layer; a head is never split."""
    return 2 * max(1, sizes["NKV"] // tp) * sizes["HD"] * kv_bytes


def attention_block_size(
    sizes: Mapping[str, int],
    *,
    tp: int = 1,
    kv_bytes: int = BF16,
    ssm_bytes: int = F32,
    num_drafts: int = 0,
    kernel_block: int = FLASH_ATTENTION,
) -> int:
    """Return N, the tokens in a block of vLLM's cache; LMCache's chunk is a multiple of it."""
    state = state_bytes(sizes, tp=tp, ssm_bytes=ssm_bytes, num_drafts=num_drafts)
    step = kernel_block * token_bytes(sizes, tp=tp, kv_bytes=kv_bytes)
    return kernel_block * -(-state // step)


def max_tensor_parallel(sizes: Mapping[str, int], *, block_fp8: bool) -> int:
    """Return the largest power of two of ranks that can share the weights without expert parallel.

    Key heads of full attention may be repeated; the other heads must divide. In block FP8 each
    rank's part of every quantised weight is a multiple of 128 both ways, else vLLM does not start.
    """
    best = tp = 1
    while _splits_heads(sizes, tp * 2):
        tp *= 2
        if not block_fp8 or _splits_blocks(sizes, tp):
            best = tp
    return best


def _splits_heads(sizes: Mapping[str, int], tp: int) -> bool:
    repeats = tp > 0 and (sizes["NKV"] % tp == 0 or tp % sizes["NKV"] == 0)
    return repeats and all(sizes[k] % tp == 0 for k in ("NH", "NK", "NV"))


def _splits_blocks(sizes: Mapping[str, int], tp: int) -> bool:
    """Tell whether each side that is split (rows or columns) leaves whole blocks to every rank."""
    split = [sizes[n] * sizes[d] for n, d in (("NH", "HD"), ("NK", "DK"), ("NV", "DV"))]
    split += [sizes[k] for k in "IFS" if k in sizes]
    repeated = max(1, sizes["NKV"] // tp) * sizes["HD"]
    return repeated % FP8_BLOCK == 0 and all(n % (tp * FP8_BLOCK) == 0 for n in split)
