"""An adapter that changes the embedding or the head of a model in which they are one tensor.

Training gave the two different values, which one tensor cannot hold. peft's merge writes the sum
into both without a word; here it is refused, unless both are to be the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from formats.adapter.names import WHOLE
from formats.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from formats.adapter.config import AdapterConfig
    from formats.adapter.names import Part
    from formats.checkpoint import Checkpoint
    from formats.safetensors.file import SafetensorsFile

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
ROWS = 1024
UNTIE = "merge it into a base model that has its own lm_head.weight and does not tie them"


def settle_tied(
    parts: Sequence[Part], base: Checkpoint, config: AdapterConfig, file: SafetensorsFile
) -> list[Part]:
    """Return the parts without a head that is a copy of the embedding. FormatError: see above."""
    if not base.layout.tied:
        return [*parts]
    ours = {_tensor(part): part for part in parts if _tensor(part) in (EMBEDDING, HEAD)}
    both = len(ours) == 2 and _are_same(file, [part.stored for part in ours.values()])
    whole = all(part.kind == WHOLE for part in ours.values())
    alone = config.tied and HEAD not in ours
    if ours and not (whole and (both or alone)):
        first = next(iter(ours.values()))
        raise FormatError(
            first.stored,
            f"changes {_tensor(first)} alone",
            f"no change, or the same of both: {EMBEDDING} is the head too in this base model",
            UNTIE,
        )
    return [part for part in parts if _tensor(part) != HEAD]


def _tensor(part: Part) -> str:
    return part.hub if part.kind == WHOLE else f"{part.hub}.weight"


def _are_same(file: SafetensorsFile, names: Sequence[str]) -> bool:
    """Whether two tensors have the same bytes."""
    import torch

    one, other = (file.read(name) for name in names)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    for start in range(0, len(one), ROWS):
        rows = slice(start, start + ROWS)
        if not torch.equal(one[rows].view(torch.uint8), other[rows].view(torch.uint8)):
            return False
        file.release()
    return True
