"""Side files and fields of an artifact that no engine loads, where there is no source to compare.

They are held to what a source must be to be converted.
"""

from __future__ import annotations

from collections.abc import Iterator

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from qwen35_convert.failure import Failure
from qwen35_convert.planning.side_files import check_sides


def unloadable(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield the first of them, if any."""
    try:
        check_sides(artifact)
    except FormatError as error:
        name, *rest = error.without_fix().split(" ", 1)
        yield Failure(name.removesuffix(":"), " ".join(rest))
