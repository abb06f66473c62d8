"""A comparison as plain text of stable width."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from typing import Any

from qwen35_convert.comparison.result import Comparison, Entry
from qwen35_convert.sizes import size_text

DASH = "-"
MARK = "*"
WIDEST = 44
FRONTIER = "on the frontier: nothing smaller is closer to the source"
HEAD = ("size", "bits", "mean KL", "+-", "median", "99.9 %", "top-1", "ppl ratio")
WIDTHS = (10, 7, 9, 9, 9, 9, 8, 10)


def comparison_text(comparison: Comparison) -> str:
    """Return a line for each artifact, the smallest first, and what they were measured on."""
    return "\n".join(_lines(comparison))


def _lines(comparison: Comparison) -> Iterator[str]:
    width = min(WIDEST, max([len("artifact"), *(len(one.name) for one in comparison.entries)]))
    yield f"  {'artifact':<{width}}{_aligned(HEAD)}"
    for one in comparison.entries:
        mark, end = MARK if one.frontier else " ", "" if one.report.passed else "  FAILED"
        yield f"{mark} {one.name:<{width}}{_aligned(_cells(one))}{end}"
    yield f"{MARK} {FRONTIER}"
    yield _basis(comparison)
    for one in comparison.entries:
        yield from _remarks(one)


def _aligned(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{wide}}" for cell, wide in zip(cells, WIDTHS, strict=True))


def _cells(one: Entry) -> list[str]:
    figures = one.figures()
    return [
        size_text(figures["model_bytes"]),
        f"{figures['bits_per_weight']:.2f}",
        *(_small(figures[key]) for key in ("kl_mean", "kl_stderr", "kl_median", "kl_p999")),
        _fixed(figures["top1"]),
        _fixed(figures["ppl_ratio"]),
    ]


def _small(value: Any) -> str:
    """Return a figure to three digits."""
    return DASH if value is None else f"{value:.3g}"


def _fixed(value: Any) -> str:
    return DASH if value is None or not isfinite(value) else f"{value:.4f}"


def _basis(comparison: Comparison) -> str:
    """Say against what, and on which text."""
    figures = comparison.as_dict()
    source, measured = figures["source"], comparison.measured
    size = f", {size_text(source['model_bytes'])}" if "model_bytes" in source else ""
    text = f"; {measured['tokens']} tokens of {comparison.text}" if measured else ""
    return f"source {source['name']}{size}{text}; sizes without vision and MTP"


def _remarks(one: Entry) -> Iterator[str]:
    """Say what its line does not show."""
    if one.calibrated:
        yield f"note: {one.name} was calibrated on this same text: its figures are too good"
    for failure in one.report.failures[:1]:
        more = len(one.report.failures) - 1
        rest = f" (and {more} more; --json lists them)" if more else ""
        yield f"FAILED: {one.name}: {failure.tensor}: {failure.problem}{rest}"
