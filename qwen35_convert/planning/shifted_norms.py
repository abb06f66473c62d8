"""Norms that hold 1 + w where the family holds w: refused, before they are shifted twice.

An MLX or GGUF model leaves them when it is renamed to the hub's layout, and nothing crashes.
Judged by all layers together, because one honest norm may well lie near 1 (a final norm often
does): trained w scatter around 0, so of a true checkpoint some norm's mean is far below. Measured
on the models we have: medians of the means -0.2 to 0.03, smallest -0.5 to -0.26; with 1 added,
medians 0.8 to 1.03, smallest 0.5 to 0.74.
"""

from __future__ import annotations

from statistics import median

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.arithmetic import AddOne, Float32
from formats.family.layout import Atom
from quant.opening import open_value

MEDIAN, SMALLEST = 0.6, 0.3
WORDS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
LAYER_NORMS = ("input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")


def check_norms(source: Checkpoint) -> None:
    """Raise FormatError if the norms of all layers look as if 1 had been added to them."""
    means = {
        atom.name: _mean(source, atom)
        for atom in source.layout.atoms.values()
        if atom.role == "norm" and _of_a_layer(atom)
    }
    middle, least = median(means.values()), min(means.values())
    if middle < MEDIAN or least < SMALLEST:
        return
    name = min(means, key=lambda name: means[name])
    raise FormatError(
        f"{source.name}: the norms hold 1 + w, their means are {least:.2f} ({name}) to "
        f"{max(means.values()):.2f}, the middle one {middle:.2f}\n"
        "  expected  means scattered around 0: the family stores w and computes with 1 + w\n"
        "  why       MLX and GGUF store 1 + w; renamed to the hub's layout, it counts twice\n"
        "  fix       convert the original checkpoint"
    )


def _of_a_layer(atom: Atom) -> bool:
    parts = atom.name.split(".")
    return parts[0] == "layers" and parts[-1] in LAYER_NORMS


def _mean(source: Checkpoint, atom: Atom) -> float:
    shifts = [op.sign for op in atom.ops if isinstance(op, AddOne)]
    light = all(isinstance(op, AddOne | Float32) for op in atom.ops)
    raw = source.raw(atom.stored) if light and atom.dtype in WORDS else None
    if raw is not None:
        return _mean_of_words(raw, atom.dtype) + sum(shifts)
    value = open_value(source, atom)
    mean = float(value.all().float().mean())
    value.release(0, value.shape[0])
    return mean


def _mean_of_words(raw: bytes, dtype: str) -> float:
    """Return the mean of stored floats without torch, which takes a second to load."""
    import numpy as np

    words = np.frombuffer(raw, WORDS[dtype])
    if dtype == "BF16":
        words = (words.astype("<u4") << 16).view("<f4")
    return float(words.mean(dtype=np.float64))
