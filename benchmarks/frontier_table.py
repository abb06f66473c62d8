"""What `benchmarks.frontier` measured, as Markdown: KL of other artifacts over that of our fits.

A fit of an artifact's own size is not made: its KL is read off the fits below and above, log KL
being taken as linear in bits between them.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import groupby
from math import exp, log
from statistics import median
from typing import Any

FIT, FIT_FOLDER, FIT_GPTQ = "fit", "fit-folder", "fit-gptq"
# Fits of a folder are what folders are beside.
BESIDE = {"recipe": FIT_FOLDER, "gptq": FIT_GPTQ}
Line = dict[str, Any]


def table(lines: Sequence[Line]) -> str:
    """Return a table of tools, then one of every artifact."""
    ordered = sorted(lines, key=lambda one: (one["model"], one["tool"], one["bits"]))
    return "\n".join([*_tools(ordered), "", *_artifacts(ordered)])


def fit_kl(lines: Sequence[Line], artifact: Line) -> float | None:
    """Return the KL of our fits at an artifact's size; None: it is a fit, or outside them."""
    tool, model, bits = (artifact[key] for key in ("tool", "model", "bits"))
    if tool in (FIT, FIT_FOLDER, FIT_GPTQ):
        return None
    fit = BESIDE.get(tool, FIT)
    fits = sorted(
        (one["bits"], one["kl"]) for one in lines if one["model"] == model and one["tool"] == fit
    )
    place = bisect(fits, (bits, 0.0))
    if not 0 < place < len(fits):
        return None
    (low, more), (high, less) = fits[place - 1], fits[place]
    share = (bits - low) / (high - low)
    return exp((1 - share) * log(more) + share * log(less))


def _tools(lines: Sequence[Line]) -> Iterator[str]:
    yield "| model | tool | artifacts | KL over our fit's: least, median, most | below our fits |"
    yield "|---|---|---|---|---|"
    for (model, tool), group in groupby(lines, key=lambda one: (one["model"], one["tool"])):
        pairs = [(one["kl"], fit_kl(lines, one)) for one in group]
        ratios = [kl / fit for kl, fit in pairs if fit]
        if ratios:
            told = f"{min(ratios):.2f}, {median(ratios):.2f}, {max(ratios):.2f}"
            below = sum(ratio < 1 for ratio in ratios)
            yield f"| {model} | {tool} | {len(ratios)} | {told} | {below} |"


def _artifacts(lines: Sequence[Line]) -> Iterator[str]:
    yield "| model | tool | artifact | MB | bits | mean KL | standard error | our fit's |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in lines:
        fit = fit_kl(lines, one)
        yield (
            f"| {one['model']} | {one['tool']} | {one['name']} | {one['bytes'] / 1e6:.2f} "
            f"| {one['bits']:.2f} | {one['kl']:.4f} | {one['kl_se']:.4f} "
            f"| {f'{fit:.4f}' if fit else ''} |"
        )
