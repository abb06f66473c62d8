"""What is inside a stored tensor that stacks or fuses several of the family: tables and operations.

Experts are stacked along the first axis, gate before up in the rows; Qwen3-Next fuses the inputs of
the delta rule by key head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from formats.family.moves import Regroup, Rows, Unstack
from formats.family.ops import Op
from formats.family.rules import EXPERTS_FUSED
from formats.family.slots import Slot

# stored role: ((projection, which half of the rows), ...)
EXPERT_PIECES: dict[str, tuple[tuple[str, int | None], ...]] = {
    "experts_gate_up": (("gate_proj", 0), ("up_proj", 1)),
    "experts_down": (("down_proj", None),),
    "experts_gate": (("gate_proj", None),),
    "experts_up": (("up_proj", None),),
}
# projection: (stored name of the stack, pieces in its rows, which of them), from the two tables
EXPERT_STACKS: dict[str, tuple[str, int, int]] = {
    projection: (rule.hub.rsplit(".", 1)[1], len(EXPERT_PIECES[rule.role]), half or 0)
    for rule in EXPERTS_FUSED
    for projection, half in EXPERT_PIECES[rule.role]
}
# stored role: (widths of one key head's pieces, ((projection, pieces), ...))
GDN_PIECES: dict[str, tuple[str, tuple[tuple[str, tuple[int, ...]], ...]]] = {
    "in_proj_qkvz": ("kkvv", (("in_proj_qkv", (0, 1, 2)), ("in_proj_z", (3,)))),
    "in_proj_ba": ("hh", (("in_proj_b", (0,)), ("in_proj_a", (1,)))),
}


def pieces_of(slot: Slot, sizes: Mapping[str, int]) -> Iterator[tuple[str, str, tuple[Op, ...]]]:
    """Yield (hub name, role, operations) of each atom inside a stored tensor."""
    role, parent = slot.rule.role, slot.hub.removesuffix(".weight").rsplit(".", 1)[0]
    if role in EXPERT_PIECES:
        experts = f"{parent.split('.mlp.', 1)[0]}.mlp.experts"
        width = sizes["F"]
        for e in range(slot.shape[0]):
            for projection, half in EXPERT_PIECES[role]:
                cut: tuple[Op, ...] = (Unstack(e),)
                if half is not None:
                    cut += (Rows(half * width, (half + 1) * width),)
                yield f"{experts}.{e}.{projection}.weight", "expert", cut
    elif role in GDN_PIECES:
        ratio = sizes["NV"] // sizes["NK"]
        dims = {"k": sizes["DK"], "v": ratio * sizes["DV"], "h": ratio}
        widths = tuple(dims[w] for w in GDN_PIECES[role][0])
        for projection, keep in GDN_PIECES[role][1]:
            regroup = Regroup(sizes["NK"], widths, keep)
            yield f"{parent}.{projection}.weight", projection, (regroup,)
    else:
        yield slot.hub, role, ()
