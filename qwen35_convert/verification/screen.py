"""A verification report as lines of plain text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from qwen35_convert.sizes import size_text
from qwen35_convert.verification.levels import Level
from qwen35_convert.verification.verify import Report

MAX_LISTED = 20


def report_lines(report: Report) -> Iterator[str]:
    """Yield a report line by line: schemes, logits, failures, the level."""
    structure = report.structure
    yield (
        f"structure   {structure['layout']} layout, {structure['tensors']} tensors, "
        f"{size_text(structure['bytes'])}, MTP layers {structure['mtp_layers']}"
    )
    for scheme, line in report.schemes.items():
        yield f"{scheme:<12}{_scheme_text(line, structure['weights'].get(scheme, 0))}"
    if report.calibration:
        yield f"calibrated  {_proof_text(report.calibration)}"
    if report.cache:
        yield f"kv cache    {_cache_text(report.cache)}"
    if report.logits:
        yield from _logits_lines(report.logits)
    for note in report.notes[:MAX_LISTED]:
        yield f"note        {note}"
    yield from _failure_lines(report)
    yield (
        f"{'passed' if report.passed else 'FAILED'}      {Level(report.level, report.raised)}"
        + ("" if report.against else ", not compared with a source")
    )


def _failure_lines(report: Report) -> Iterator[str]:
    for failure in report.failures[:MAX_LISTED]:
        yield f"FAILED      {failure.tensor}\n            {failure.problem}"
    if len(report.failures) > MAX_LISTED:
        yield f"            and {len(report.failures) - MAX_LISTED} more (--json lists them)"


def _proof_text(calibration: dict[str, Any]) -> str:
    """Say how calibrated weights were proven."""
    if calibration["proof"] == "again":
        return f"{calibration['method']}, proven by running the calibration again"
    if not calibration["layers"]:
        return f"{calibration['method']}, proven by bounds: {calibration['why']}"
    layers = f"{calibration['layers_again']} of {calibration['layers']} layers"
    of = f"{layers} by running the calibration again"
    return f"{calibration['method']}, proven by bounds ({of}): {calibration['why']}"


def _cache_text(cache: dict[str, Any]) -> str:
    """Say how the scales of an FP8 cache were proven."""
    if cache["proof"] == "again":
        return f"{cache['scales']} scales, equal to those measured on the text"
    return f"{cache['scales']} scales, checked against what the weights allow: {cache['why']}"


def _logits_lines(logits: dict[str, Any]) -> Iterator[str]:
    yield (
        f"logits      mean KL {logits['kl_mean']:.3g}, 99.9 % {logits['kl_p999']:.3g}, "
        f"top-1 {logits['top1']:.4f}, perplexity {logits['ppl_source']:.4f} -> "
        f"{logits['ppl_artifact']:.4f}, {logits['tokens']} tokens"
    )
    limits = logits["limits"]
    top1 = "" if limits["min_top1"] is None else f", top-1 at least {limits['min_top1']}"
    yield f"limits      mean KL at most {limits['max_kl']:.3g} ({limits['why']}){top1}"
    for layer in logits["layers"]:
        yield f"layer {layer['layer']:<6}{layer['kind']:<18}error {layer['relative_error']:.3g}"


def _scheme_text(line: dict[str, Any], weights: int) -> str:
    tensors = f"{line['tensors']} tensor{'' if line['tensors'] == 1 else 's'}"
    if "relative_rms" not in line:
        return f"{tensors}, compared byte for byte"
    zeros = f"{line['zeros']:,} of {weights:,} ({line['zeros'] / max(1, weights):.2%})"
    return (
        f"{tensors}, relative RMS error {line['relative_rms']:.4%}, "
        f"cosine {line['cosine']:.6f}, largest error {line['max_abs']:.3g}, "
        f"saturated: {line['saturated']:,}, rounded to zero: {zeros}"
    )
