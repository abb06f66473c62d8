"""The lines of results: one JSON object for each thing that is measured, appended to a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def append(results: Path, line: Mapping[str, object]) -> None:
    """Append a line to a file of results."""
    results.parent.mkdir(exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")


def record(results: Path, line: Mapping[str, object]) -> None:
    """Print a line, and append it to a file of results."""
    print(json.dumps(line), flush=True)
    append(results, line)


def rounded(line: Mapping[str, Any], digits: int) -> dict[str, Any]:
    """Return a line whose numbers have so many digits after the point."""
    return {k: round(v, digits) if isinstance(v, float) else v for k, v in line.items()}
