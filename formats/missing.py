"""A path that is not there, and the one that may have been meant."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from pathlib import Path

from formats.errors import FormatError
from formats.links import is_folder
from formats.nearest import nearest

MAX_NAMES = 10_000
ON_THE_HUB = ", or owner/name for a repository on the hub, such as Qwen/Qwen3.5-27B"


def missing(path: Path, expected: str, elsewhere: str = ON_THE_HUB) -> FormatError:
    """Return the error for a path that is not there, with the nearest that is.

    elsewhere  what may be given instead of a path
    """
    found = near(path)
    such = f", such as {found}" if found else ""
    fix = f"give a path that exists{such}{elsewhere}"
    return FormatError(str(path), "does not exist", expected, fix)


def near(path: Path) -> Path | None:
    """Return the path that there is if one name in `path` is spelt as it is on the disk."""
    lost = path
    while lost.parent != lost and not is_folder(lost.parent):
        lost = lost.parent
    with suppress(OSError):
        names = sorted(one.name for one in islice(lost.parent.iterdir(), MAX_NAMES))
        meant = lost.parent / (nearest(lost.name, names) or lost.name) / path.relative_to(lost)
        return meant if meant.exists() else None
    return None
