"""Side files that stand in folders of their own: named chat templates, parts of an embedder.

    additional_chat_templates/tool_use.jinja      transformers: templates beside the default one
    1_Pooling/config.json                         sentence-transformers: what modules.json names

A name is a path of two parts with one slash, wherever it is written: a receipt, a plan, the hub.
"""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path

TEMPLATES = "additional_chat_templates"
NESTED = (f"{TEMPLATES}/*.jinja", "[0-9]_*/config.json")
FOLDERS = tuple(pattern.split("/")[0] for pattern in NESTED)
MAX_NAMES = 64


def names_in(folder: Path) -> frozenset[str]:
    """Return the names in a folder; none where it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return frozenset(entry.name for entry in entries)
    except OSError:
        return frozenset()


def is_nested(name: str) -> bool:
    """Whether this is the name of such a file."""
    return name.count("/") == 1 and any(fnmatchcase(name, pattern) for pattern in NESTED)


def nested_names(folder: Path) -> list[str]:
    """Return the names of such files in a folder, in a fixed order; at most 64."""
    inside = names_in(folder)
    if not any(fnmatchcase(name, pattern) for pattern in FOLDERS for name in inside):
        return []
    paths = (path for pattern in NESTED for path in folder.glob(pattern) if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in paths)[:MAX_NAMES]
