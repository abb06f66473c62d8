"""Which fields of a JSON file somebody obeys, and what they mean where they are absent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from qwen35_convert.difference import ABSENT, differences, near

# Where a token is said to begin in the text; which tokens there are does not depend on it.
PLACES = "trim_offsets"


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one kind of file; null is absent.

    absent   what those that are always obeyed mean where they are absent
    records  those that nobody obeys
    every    whether all others are obeyed, too; if not, they are compared where both sides have one
    """

    absent: Mapping[str, Any]
    records: frozenset[str] = field(default_factory=frozenset)
    every: bool = False

    def differences(self, got: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
        """Yield a sentence for each field that is obeyed and means something else."""
        for key in dict.fromkeys((*expected, *got)):
            ours, theirs = self._of(got, key), self._of(expected, key)
            alone = ours is ABSENT or theirs is ABSENT
            if key not in self.records and (self.every or not alone):
                yield from differences(meant(ours), meant(theirs), key, near)

    def _of(self, side: Mapping[str, Any], key: str) -> Any:
        value = side.get(key)
        given = value is not None and (key in self.absent or not _is_empty(value))
        return value if given else self.absent.get(key, ABSENT)


def meant(value: Any) -> Any:
    """Return a value without what says nothing: empty fields, false ones, places in the text.

    A sequence of one part is that part.
    """
    if isinstance(value, list):
        return [meant(part) for part in value]
    if not isinstance(value, dict):
        return value
    kept = {key: meant(inner) for key, inner in value.items() if key != PLACES}
    filled = {key: inner for key, inner in kept.items() if not _is_empty(inner)}
    parts = next((inner for inner in filled.values() if isinstance(inner, list)), ())
    return parts[0] if filled.get("type") == "Sequence" and len(parts) == 1 else filled


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def token(value: Any) -> Any:
    """Return the text of a token; with the flags that are set, if it is written with them."""
    if not isinstance(value, dict):
        return value
    fields = {key: inner for key, inner in value.items() if key not in ("special", "__type")}
    flags = {key for key, inner in fields.items() if key != "content" and not _is_empty(inner)}
    return fields if flags else fields.get("content")


def as_object(value: Any) -> dict[str, Any]:
    """Return an object; what is none has no fields."""
    return value if isinstance(value, dict) else {}


def as_objects(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; what is none has none."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
