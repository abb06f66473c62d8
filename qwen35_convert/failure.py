"""What verification reports: one thing that is wrong with an artifact."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failure:
    """One thing that is wrong with an artifact."""

    tensor: str
    problem: str

    def as_dict(self) -> dict[str, str]:
        """Return it as reports and receipts print it."""
        return {"tensor": self.tensor, "problem": self.problem}
