"""The scales of an FP8 cache: what a text brings to it, or else what the weights allow.

Where recipe, source and text are at hand, the scales are computed again. Sums in another order, on
another machine, may end in the next bfloat16. Otherwise a scale must be a number above 0 at which
keys or values neither all saturate nor all vanish, by what bounds them:

    |k| <= sqrt(d) max|1 + w|               w of k_norm: a norm fixes the length, rope keeps it
    |v| <= sqrt(H) max_i |W_i * (1 + w)|    W of v_proj, w of the norm before it

Shape letters: d head size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from formats.family.cache_scales import ATTENTION, KEYS, cache_scales
from quant.opening import open_value
from qwen35_convert.failure import Failure
from qwen35_convert.recipe.parts import NO_CACHE
from qwen35_convert.verification.proof import Proof

if TYPE_CHECKING:
    from torch import Tensor

LARGEST, SMALLEST = 448.0, 2.0**-6  # of E4M3, before numbers lose bits
# A step of bfloat16.
NEXT = 2.0**-7
# Rounding of what is computed, and a factor that some kinds of rope have.
SLACK = 2.0
# So far below the longest row of v_proj no value stays over a text.
LOW_VALUES = 1024.0


@dataclass(frozen=True, slots=True)
class Reach:
    """How large the largest key, or value, of a layer is: at most, and surely at least."""

    most: float
    least: float


def cache_failures(proof: Proof) -> Iterator[Failure]:
    """Yield the scales that are no scales, are not those of the text, or cannot be right."""
    by_attention = cache_scales(proof.artifact.layout.activation_scales)
    values = {
        name: _value(proof.artifact, name) for one in by_attention.values() for name in one.values()
    }
    for name, value in values.items():
        if value is not None and not (isfinite(value) and value > 0):
            yield Failure(name, f"is {value:g}, expected a number above 0: it scales a cache")
    right = {name: x for name, x in values.items() if x is not None and isfinite(x) and x > 0}
    computed = proof.expected.computed if proof.expected else {}
    proof.cache = _told(proof, len(values), again=bool(computed))
    if computed:
        yield from _unlike({name: float(scale) for name, scale in computed.items()}, right)
        return
    for attention, scales in by_attention.items():
        for what, name in scales.items():
            if name in right:
                yield from _implausible(proof, attention, what, name, right[name])


def _told(proof: Proof, count: int, *, again: bool) -> dict[str, Any] | None:
    """Return what the report says of the scales; None if there are none."""
    if not count:
        return None
    why = None if again else proof.no_text or "source, recipe and text are not available"
    return {"scales": count, "proof": "again" if again else "bounds", "why": why}


def _value(artifact: Checkpoint, name: str) -> float | None:
    """Return a scale; None if it is not one number, which headers show."""
    scale = artifact.load(name, artifact.read(name), ...)
    return float(scale) if scale.numel() == 1 else None


def _unlike(made: Mapping[str, float], stored: Mapping[str, float]) -> Iterator[Failure]:
    """Yield the scales that are not what the text gives."""
    for name, expected in made.items():
        got = stored.get(name, expected)
        if not _alike(got, expected):
            whose = next((n for n, x in made.items() if _alike(got, x)), None)
            problem = f"is {got:g}" + (f", which is that of {whose}" if whose else "")
            yield Failure(name, f"{problem}, but the text gives {expected:g}")


def _alike(got: float, expected: float) -> bool:
    """Whether two scales are the same, or the next bfloat16."""
    return abs(got - expected) <= expected * NEXT


def _implausible(
    proof: Proof, attention: str, what: str, name: str, scale: float
) -> Iterator[Failure]:
    """Yield a scale at which all keys, or all values, saturate or vanish.

    One that was computed is no larger than they can be.
    """
    reach = _reach(proof.artifact, attention, what)
    if reach is None:
        return
    if scale * LARGEST < reach.least / SLACK:
        problem = f"is {scale:g}, at which {what} saturate from {scale * LARGEST:.3g}"
        yield Failure(name, f"{problem}, but the largest reach {reach.least:.3g} at least")
    limit = reach.most * SLACK / (LARGEST if _is_computed(proof) else SMALLEST)
    if scale > limit > 0:
        yield Failure(name, f"is {scale:g}, but {what} reach {reach.most:.3g} at most")


def _is_computed(proof: Proof) -> bool:
    """Whether the artifact's own recipe computes the scales: others may state a constant."""
    basis = proof.expected or proof.receipt
    return basis is not None and basis.recipe.quantize.kv_cache != NO_CACHE


def _reach(artifact: Checkpoint, attention: str, what: str) -> Reach | None:
    """Return what bounds the keys or values of a layer; None if it has no such tensors."""
    layer = attention.removesuffix(f".{ATTENTION}")
    norm = f"{attention}.k_norm" if what == KEYS else f"{layer}.input_layernorm"
    projection = f"{attention}.v_proj"
    if not {norm, projection} <= artifact.layout.atoms.keys():
        return None
    factors = (1 + _rows(artifact, norm)).abs()
    width = sqrt(factors.numel())
    if what == KEYS:
        return Reach(width * float(factors.max()), float(factors.min()))
    longest = float((_rows(artifact, projection) * factors).norm(dim=-1).max())
    return Reach(width * longest, longest / LOW_VALUES)


def _rows(artifact: Checkpoint, name: str) -> Tensor:
    value = open_value(artifact, artifact.layout.atoms[name])
    count = value.shape[0]
    rows = value.exact(0, count).float()
    value.release(0, count)
    return rows
