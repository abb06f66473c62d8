"""What the logits of an artifact must meet: what is stated, else a limit for how it is stored.

    limit = 4 * mean KL of the scheme, in nats a token, at most 1

The mean KL is the largest measured on held-out text: our recipes and llama.cpp's mixes, on three
trained models (8 dense layers, 16 experts, the bundled one; README has the figures). Where no such
figure exists it is 25 times the square of the weights' relative RMS error, the largest ratio that
the bundled model shows. 4 leaves room for models more sensitive than these. The scheme that costs
most decides, if a hundredth of the bytes or more is stored so; an FP8 cache adds its own. A model
of zeros predicts every token alike, which is 3.5 nats from the bundled model, and more from larger
ones.

Trap: a default limit catches what is broken, not what is poor. A gate for releases states its own
`max_kl`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from formats.checkpoint import Checkpoint
from formats.family.cache_scales import has_fp8_cache

FACTOR = 4
LOOSEST = 1.0
SHARE = 0.01
LIMITS = {
    # kept: the same sums of the same numbers; GGUF's 1 + w in F32 costs 1e-12
    "keep": 1e-6,
    "f32": 1e-6,
    # from the weights' error: BF16 0.17 % of F32; F16 of BF16 loses small numbers only
    "bf16": FACTOR * 0.00007,
    "f16": FACTOR * 0.00001,
    "fp8-block": FACTOR * 0.011,
    "fp8-channel": FACTOR * 0.011,
    # 50 linears of two small trained models, the nearest codes
    "nvfp4a16": FACTOR * 0.14,
    "nvfp4": FACTOR * 0.14,  # predictions are those of its weights
    "mxfp4a16": FACTOR * 0.20,
    "int4": FACTOR * 0.17,
    "int8": FACTOR * 0.0020,
    "q8_0": FACTOR * 0.0017,
    "q6_k": FACTOR * 0.0064,
    "q5_k": FACTOR * 0.016,
    "q5_1": FACTOR * 0.024,
    "q5_0": FACTOR * 0.030,
    "q4_k": FACTOR * 0.042,
    "iq4_xs": FACTOR * 0.044,
    "q4_1": FACTOR * 0.058,
    "iq4_nl": FACTOR * 0.068,
    "q4_0": FACTOR * 0.079,
    # of all weights, from their error of 11, 15 and 30 %; on experts alone MXFP4 costs 0.025
    "mxfp4": LOOSEST,
    "q3_k": LOOSEST,
    "q2_k": LOOSEST,
    # all linears of the dense one with an importance matrix: 0.073 to 0.7
    **dict.fromkeys(("iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs"), LOOSEST),
}
# what keys and values in FP8 add, on the two small models and two texts
FP8_CACHE = FACTOR * 0.0022


@dataclass(frozen=True, slots=True)
class Limits:
    """What must hold; `why` says where the limit of the mean KL is from."""

    max_kl: float
    min_top1: float | None
    why: str

    def as_dict(self) -> dict[str, Any]:
        """Return the limits as `verify --json` prints them."""
        return {"max_kl": self.max_kl, "min_top1": self.min_top1, "why": self.why}


def limits_of(artifact: Checkpoint, max_kl: float | None, min_top1: float | None) -> Limits:
    """Return what is stated; where no `max_kl` is, the default for how the artifact is stored."""
    if max_kl is not None:
        return Limits(max_kl, min_top1, "stated")
    scheme = costliest(artifact)
    limit, why = LIMITS.get(scheme, LOOSEST), f"default for {scheme}"
    if has_fp8_cache(artifact.config):
        limit, why = min(limit + FP8_CACHE, LOOSEST), f"{why} and an FP8 cache"
    return Limits(float(f"{limit:.3g}"), min_top1, why)


def costliest(artifact: Checkpoint) -> str:
    """Return the scheme with the loosest limit among those that hold a share of the bytes."""
    sizes: Counter[str] = Counter()
    infos = artifact.infos()
    for atom in artifact.layout.atoms.values():
        sizes[atom.scheme] += sum(infos[part].nbytes for part in atom.parts)
    least = SHARE * sizes.total()
    common = [scheme for scheme, nbytes in sizes.items() if nbytes >= least]
    return max(common, key=lambda scheme: (LIMITS.get(scheme, LOOSEST), sizes[scheme]))
