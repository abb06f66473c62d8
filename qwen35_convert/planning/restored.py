"""Which type the weights of a GGUF file go back to when they are kept.

GGUF stores norms, convolutions and routers in F32 whatever they were. The hub has F32 for A_log and
the norm of the delta rule, BF16 for all else, and BF16 fits into F32: so an F32 file whose
embedding holds nothing but BF16 numbers was BF16, and what was quantised was too.
"""

from __future__ import annotations

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from formats.family.roles import ROLES
from quant.opening import open_value

SAMPLE_ROWS = 16


def kept_dtype(atom: Atom, widened_from: str | None) -> str:
    """Return the type in which a kept atom is written to a folder.

    widened_from  the model's type, if the source's container has widened what it kept
    """
    if widened_from is None:
        return atom.dtype
    if ROLES[atom.role].hub_f32:
        return "F32"
    return atom.dtype if atom.dtype != "F32" else widened_from


def model_dtype(source: Checkpoint) -> str:
    """Return BF16, or F32 if the numbers of the embedding's first rows need it."""
    atom = source.layout.atoms["embed_tokens"]
    if source.infos()[atom.stored].dtype != "F32":
        return "BF16"
    import torch

    rows = open_value(source, atom).rows(0, min(SAMPLE_ROWS, atom.shape[0]))
    return "BF16" if torch.equal(rows.to(torch.bfloat16).float(), rows) else "F32"
