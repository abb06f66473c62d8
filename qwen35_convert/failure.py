"""What verification reports: one thing that is wrong with an artifact."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that is wrong with an artifact."""

    tensor: str
    problem: str
