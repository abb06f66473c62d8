"""`hf_quant_config.json`, ModelOpt's own file: what it says where config.json says nothing.

    {"producer": {...}, "quantization": {"quant_algo": ..., "exclude_modules": [...], ...}}

vLLM reads it only if config.json has no quantization_config; TensorRT-LLM reads it always.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from formats.errors import FormatError
from formats.quant_methods import MODELOPT

HF_QUANT = "hf_quant_config.json"


def quantization_of(read: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    """Return what the file says as a quantization_config; None if it says nothing, or is none."""
    try:
        quantization = read().get("quantization")
    except FormatError:
        return None
    return {"quant_method": MODELOPT} | quantization if isinstance(quantization, dict) else None
