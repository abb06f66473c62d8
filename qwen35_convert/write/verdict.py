"""What the verdict in a receipt says of its artifact, and how far that is believed.

Anybody can write a receipt: no key is taken for granted, and what contradicts itself is no pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a conversion's own verification found, by the keys of the receipt."""

    values: Mapping[str, Any]

    @property
    def level(self) -> Any:
        """The level it was verified at."""
        return self.values.get("level")

    @property
    def failed(self) -> bool:
        """Whether it says that the artifact failed."""
        return self.values.get("passed") is False

    @property
    def passed(self) -> bool:
        """Whether it says that the artifact passed, and lists no failure."""
        return self.values.get("passed") is True and not self.values.get("failures")

    @property
    def contradiction(self) -> str | None:
        """How its failures contradict what it says of passing; None if they do not."""
        passed, failures = self.values.get("passed"), self.values.get("failures")
        if passed is (failures == []):
            return None
        return f"verdict.passed is {passed}, but verdict.failures are {failures}"

    @property
    def why(self) -> str:
        """The first failure; empty if none is named."""
        failures = self.values.get("failures")
        first = failures[0] if isinstance(failures, list) and failures else None
        return str(first.get("problem")) if isinstance(first, dict) else ""
