"""A weight that is not what its scheme stores of the source, where all others of the scheme are.

Bounds let every right encoder pass, so they also pass values that are a per cent larger than the
source's, or that have a little noise. An encoder is the same for all weights of a scheme: where
nearly all of them are, code by code, what our own stores, the one that is not was changed before.

Where another encoder, a search or GPTQ made the file, few weights or none are ours, and nothing
follows. A few codes may differ by the order of a sum.

What all weights of a scheme show together, though each has too few codes for it, is named for each:
that GPTQ began with other values (`quant.fourbit.pushed`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from quant.fourbit.pushed import early
from quant.measure import Pushed
from qwen35_convert.verification.compare import Compared

# Of the weights of a tensor, the share that is ours where it is the same encoder, and where not.
SAME, OTHER = 0.999, 0.98
# So few tensors show no rule; so many exceptions are another rule: one of LEAST or of MANY.
LEAST, MANY = 8, 20


def with_odd_ones(compared: Sequence[Compared]) -> list[Compared]:
    """Return what was compared, with a fault for each weight that alone is not ours."""
    by_scheme = defaultdict[str, list[Compared]](list)
    for one in compared:
        if one.error.count:
            by_scheme[one.scheme].append(one)
    odd = {
        one.name: _sentence(one, len(every)) for every in by_scheme.values() for one in _odd(every)
    }
    odd |= {
        one.name: said for every in by_scheme.values() for said in _together(every) for one in every
    }
    return [
        replace(one, faults=(*one.faults, odd[one.name])) if one.name in odd else one
        for one in compared
    ]


def _odd(every: Sequence[Compared]) -> list[Compared]:
    """Return the exceptions of a scheme; none where there are many, or other ones."""
    same = [one for one in every if _share(one) >= SAME]
    odd = [one for one in every if _share(one) < OTHER]
    few = len(odd) <= max(1, len(every) // MANY)
    return odd if few and len(every) >= LEAST and len(same) + len(odd) == len(every) else []


def _together(every: Sequence[Compared]) -> list[str]:
    """Return what is wrong with weights of a scheme of which none is at fault by itself."""
    sums = [one.error.pushed for one in every if one.error.pushed is not None]
    if not sums or any(one.faults for one in every):
        return []
    return early(Pushed(*map(sum, zip(*sums, strict=True))))


def _share(one: Compared) -> float:
    return one.error.alike / one.error.count


def _sentence(one: Compared, count: int) -> str:
    return (
        f"only {_share(one):.0%} of its codes are those of the source's values, but in the other "
        f"{count - 1} weights of {one.scheme} all are: it was rounded from other values"
    )
