"""How the files of an embedding model differ: modules, pooling, prompts, the length of a text.

What they say counts, not how it is written; a tool that drops one makes another model of it.
"""

from __future__ import annotations

import json

from formats.checkpoint import Checkpoint
from formats.embedder import MODULES, PROMPTS, modules

LENGTHS = "sentence_bert_config.json"


def embedder_names(checkpoint: Checkpoint) -> list[str]:
    """Return the names of these files beside a checkpoint; FormatError for a wrong modules.json."""
    parts = (f"{module.path}/config.json" for module in modules(checkpoint.sides))
    names = (MODULES, PROMPTS, LENGTHS, *parts)
    return [name for name in names if name in checkpoint.sides]


def alike(got: bytes, expected: bytes) -> bool:
    """Whether two files say the same, however they are written."""
    try:
        return got == expected or bool(json.loads(got) == json.loads(expected))
    except ValueError:
        return False
