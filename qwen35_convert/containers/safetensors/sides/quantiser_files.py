"""The config of GPTQ, AWQ or AutoRound in a file of its own, as their tools write it.

It is right where it says of every field that config.json has the same.
"""

from __future__ import annotations

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.packings import PACKINGS
from formats.json_file import read_object
from qwen35_convert.difference import same

FILES = ("quantize_config.json", "quant_config.json", "quantization_config.json")


def repeats_block(artifact: Checkpoint, name: str) -> bool:
    """Whether a file says no more than the quantization_config that the artifact has."""
    block = artifact.config.quantization or {}
    packed = any(atom.quantized for atom in artifact.layout.atoms.values())
    if name not in FILES or not packed or block.get("quant_method") not in PACKINGS:
        return False
    try:
        fields = read_object(artifact.folder / name)
    except FormatError:
        return False
    return all(same(value, block[field]) for field, value in fields.items() if field in block)
