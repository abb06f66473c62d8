"""Linears that hold FP8 codes for values, because their scale was lost: refused by name.

A linear in BF16 beside FP8 siblings is one that was never quantised, or one whose codes were cast
and whose scale is gone; its values are then some 200 times too large, and no engine notices. The
values tell: codes are FP8 numbers, of which there are 253, and reach up to 448. Of a thousand
trained weights none but a handful are such numbers, and none is as large as LARGE.

Only SAMPLE_ROWS of a weight are read, from all over it, and only where config or tensors are FP8.
"""

from __future__ import annotations

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.layout import Atom
from formats.family.roles import ROLES
from quant.errors import RESTORE_SCALE
from quant.fp8.scales import holds_codes
from quant.opening import open_value

SAMPLE_ROWS = 8
LARGE = 8.0


def check_scales(source: Checkpoint) -> None:
    """Raise FormatError for linears of an FP8 checkpoint that hold codes without a scale."""
    infos, atoms = source.infos(), source.layout.atoms.values()
    quantized = source.config.quantization is not None
    if not quantized and not any(holds_codes(infos[atom.stored]) for atom in atoms):
        return
    plain = (atom for atom in atoms if ROLES[atom.role].linear and not atom.quantized)
    lost = [atom for atom in plain if _holds_codes(source, atom)]
    if lost:
        more = f" and {len(lost) - 1} more" if lost[1:] else ""
        raise FormatError(
            f"{lost[0].stored}{more}",
            f"{'hold' if more else 'holds'} FP8 codes in {lost[0].dtype}, without a scale",
            "weights, or codes with the scale beside them",
            RESTORE_SCALE,
            where="its values: all are FP8 numbers, far larger than weights",
        )


def _holds_codes(source: Checkpoint, atom: Atom) -> bool:
    """Whether all values of a few rows are FP8 numbers, and too large for weights."""
    import torch

    value = open_value(source, atom)
    rows = value.pick(torch.linspace(0, atom.shape[0] - 1, SAMPLE_ROWS).long()).float()
    value.release(0, SAMPLE_ROWS)
    types = (torch.float8_e4m3fn, torch.float8_e5m2)
    coded = any(torch.equal(rows.to(dtype).float(), rows) for dtype in types)
    return coded and bool(rows.abs().max() >= LARGE)
