"""Words of `quant_method` in a quantization_config: by whose names and rules weights are stored."""

from __future__ import annotations

FP8, COMPRESSED, MODELOPT = "fp8", "compressed-tensors", "modelopt"
GPTQ, AWQ = "gptq", "awq"
