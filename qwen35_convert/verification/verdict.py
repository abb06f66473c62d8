"""The verdict of a conversion's own verification, as its receipt holds it.

Equal machines give equal bytes. Real numbers are rounded to four significant digits: another order
of a sum changes the seventh of a logit. A KL below 1e-9 is written as 0: it is rounding alone.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

from qwen35_convert.verification.logits import MEASURED
from qwen35_convert.verification.verify import Report

DIGITS = 4
NOISE = 1e-9
MAX_FAILURES = 20


def verdict(report: Report) -> dict[str, Any]:
    """Return level, thresholds, what was measured on which text, and at most 20 failures."""
    logits = report.logits
    return {
        "level": report.level,
        "raised": report.raised,
        "thresholds": logits["limits"] if logits else None,
        "text_sha256": logits["text_sha256"] if logits else None,
        "measured": {key: _rounded(logits[key]) for key in MEASURED} if logits else None,
        "passed": report.passed,
        "failures": [failure.as_dict() for failure in report.failures[:MAX_FAILURES]],
    }


def _rounded(x: float) -> float:
    if isinstance(x, int) or not isfinite(x):
        return x
    return 0.0 if abs(x) < NOISE else float(f"{x:.{DIGITS}g}")
