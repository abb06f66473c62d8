"""Which quantisers' checkpoints are read, by config.json or by a file of theirs beside it."""

from __future__ import annotations

from functools import partial
from typing import Any

from formats.errors import FormatError
from formats.family.leftovers import FROM_ORIGINAL
from formats.family.packings import PACKINGS, odd_packing
from formats.quant_methods import AWQ, COMPRESSED, FP8, GPTQ, MODELOPT
from formats.safetensors.hf_quant import HF_QUANT, quantization_of
from formats.safetensors.place import Place

BLOCK = "quantization_config"
EDGE = 128
# Older tools leave the block out of config.json and write it by itself: by file, the method.
BESIDE = {"quantize_config.json": GPTQ, "quant_config.json": AWQ, HF_QUANT: MODELOPT}
# What `quant_method` may say, and which `quant_algo` beside it; None: the tensors say the rest.
KNOWN_METHODS: dict[str, tuple[object, ...] | None] = {
    FP8: None,
    "fbgemm_fp8": None,
    COMPRESSED: None,
    **dict.fromkeys(PACKINGS),
    MODELOPT: (
        *(None, "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"),
        *("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"),
    ),
}


def block_beside(place: Place, raw: dict[str, Any]) -> tuple[str, ...]:
    """Return the file that holds the block of a config.json which has none; none may have it."""
    text = raw.get("text_config")
    if raw.get(BLOCK) or (isinstance(text, dict) and text.get(BLOCK)):
        return ()
    return tuple(name for name in BESIDE if name in place.names)[:1]


def with_block(place: Place, raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json with the block that stands in a file beside it, if it has none."""
    for name in block_beside(place, raw):
        own = name == HF_QUANT
        block = quantization_of(partial(place.read, name)) if own else place.read(name)
        return raw if block is None else raw | {BLOCK: {"quant_method": BESIDE[name]} | block}
    return raw


def refuse_method(raw: dict[str, Any]) -> None:
    """Refuse by name what another quantiser wrote, from the config alone."""
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, dict) else {}):
        block = part.get("quantization_config") or part.get("quantization") or {}
        if not isinstance(block, dict):
            raise FormatError("config.json: quantization_config is not an object")
        unnamed = "mlx" if "group_size" in block else "an unnamed method"
        method, algo = block.get("quant_method", unnamed), block.get("quant_algo")
        algorithms = KNOWN_METHODS.get(str(method), ())
        if block and algorithms is not None and algo not in algorithms:
            by = f"{method} {algo}" if algo else method
            raise FormatError(
                f"config.json: the checkpoint is quantised by {by}, "
                "expected BF16, F16, F32 or FP8 weights, or codes of compressed-tensors, ModelOpt "
                "(NVFP4), GPTQ, AWQ or AutoRound\n"
                f"  fix   {FROM_ORIGINAL}"
            )
        odd = odd_packing(block)
        if odd is not None:
            raise FormatError(f"config.json: {BLOCK} of {method}", odd[0], odd[1], FROM_ORIGINAL)
        size = block.get("weight_block_size")
        if size not in (None, [EDGE, EDGE]):
            raise FormatError(
                f"config.json: weight_block_size is {size}, expected [{EDGE}, {EDGE}]\n"
                f"  fix   {FROM_ORIGINAL}"
            )
