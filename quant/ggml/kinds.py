"""ggml's types: which there are, how many columns and bytes a block has, who searches a scale.

Names are ggml's ("Q4_K"), block sizes those of the `gguf` package. Importing this module imports
neither torch nor numba nor gguf.
"""

from __future__ import annotations

from functools import cache

from quant.errors import QuantError

CASTS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LOOPS = {
    "Q8_0": "quant.ggml.legacy_symmetric", "Q4_0": "quant.ggml.legacy_symmetric",
    "Q4_1": "quant.ggml.legacy_line", "Q5_0": "quant.ggml.legacy_symmetric",
    "Q5_1": "quant.ggml.legacy_line", "MXFP4": "quant.ggml.mxfp4",
    "NVFP4": "quant.ggml.nvfp4", "IQ4_NL": "quant.ggml.iq4", "IQ4_XS": "quant.ggml.iq4",
}  # fmt: skip
# Where each type's super-block keeps its float16 scales.
K_QUANTS = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
I_QUANTS = dict.fromkeys(("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS"), (0,))
SUPER_BLOCKS = K_QUANTS | I_QUANTS
WRITABLE = (*CASTS, *LOOPS, *SUPER_BLOCKS)
# What `outside` bounds: codes of the others are a grid's, which follow from no scale alone.
BOUNDED = tuple(name for name in WRITABLE if name not in I_QUANTS)

# With an importance matrix these are searched, and those are not.
SEARCHED = {"Q4_0": 8, "Q5_0": 16, "Q4_1": 15, "Q5_1": 31}  # codes on one side, or above 0
UNWEIGHTED = frozenset({"Q8_0", "MXFP4", "NVFP4", *CASTS})
# ggml encodes these with an importance matrix only, and llama-quantize refuses those without.
WEIGHTED_ONLY = frozenset({"IQ2_XXS", "IQ2_XS"})
POOR_UNWEIGHTED = WEIGHTED_ONLY | {"IQ2_S", "IQ3_XXS"}

# What llama-quantize takes where rows are no multiple of 256; where not of 32 either, F16.
INSTEAD = {
    "Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0",
    "TQ1_0": "Q4_0", "TQ2_0": "Q4_0", "IQ4_XS": "IQ4_NL", "IQ3_S": "IQ4_NL", "IQ3_XXS": "IQ4_NL",
    "IQ2_S": "IQ4_NL", "IQ2_XS": "IQ4_NL", "IQ2_XXS": "IQ4_NL",
    "IQ1_S": "IQ4_NL", "IQ1_M": "IQ4_NL", "NVFP4": "Q8_0",
}  # fmt: skip


@cache
def block(name: str) -> tuple[int, int]:
    """Return the columns and the bytes of one block. Raises QuantError for an unknown name."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if name not in GGMLQuantizationType.__members__:
        raise QuantError(f"ggml has no type {name!r},\n  expected {writable()}")
    columns, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    return int(columns), int(size)


def row_bytes(name: str, columns: int) -> int:
    """Return the bytes of a row. Raises QuantError if it is not a whole number of blocks."""
    block_columns, block_bytes = block(name)
    if columns % block_columns:
        raise QuantError(
            f"{name} has blocks of {block_columns} columns, a row has {columns},\n"
            f"  expected a multiple; llama-quantize takes {fallback(name, columns)} instead"
        )
    return columns // block_columns * block_bytes


def columns(name: str, num_bytes: int) -> int:
    """Return the columns of a row of so many bytes. Raises QuantError if a block is cut."""
    block_columns, block_bytes = block(name)
    if num_bytes % block_bytes:
        raise QuantError(
            f"a row has {num_bytes} bytes,\n"
            f"  expected a multiple of {block_bytes}, the bytes of one {name} block"
        )
    return num_bytes // block_bytes * block_columns


def fallback(name: str, columns: int) -> str:
    """Return the type llama-quantize takes for rows of this length: `name`, if they fit it."""
    if columns % block(name)[0] == 0:
        return name
    instead = INSTEAD.get(name, "F16")
    return instead if columns % block(instead)[0] == 0 else "F16"


def writable() -> str:
    """Name all types that can be written."""
    return "one of " + " ".join(WRITABLE)
