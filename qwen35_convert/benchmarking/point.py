"""One measured step, as the report prints it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Point:
    """One measured step. `floor_ms` is None on a machine whose limits are not known."""

    what: str
    batch: int
    tokens: int
    ms: float
    eager_ms: float | None
    tokens_per_s: float
    bytes_moved: float
    flops: float
    floor_ms: float | None
    fraction_of_floor: float | None
    peak_memory: int | None
    device: str
    peer_ms: float | None = None
