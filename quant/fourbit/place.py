"""Where rows are encoded: on the CPU row by row, or many matrices together where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quant.scheme import Factor


def place_of(factor: Factor | None) -> tuple[Any, Any]:
    """Return what encodes groups, and what chooses their steps and units.

    factor  of one matrix, or of several together
    """
    from quant.fourbit import batched, calibrate, cpu, device

    return (device, batched) if isinstance(factor, batched.Factors) else (cpu, calibrate)
