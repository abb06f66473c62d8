"""What tensor parallelism does to groups of columns: a rank has to hold whole ones.

Engines part o_proj, out_proj and down_proj by columns. At 8 GPUs a rank of the 0.8B's down_proj has
448 columns, and one of experts with 512 has 64: no whole group of 128.

Measured: experts whose rows are one single group come out wrong in vLLM 0.26 on Hopper (perplexity
353 for 19), where two groups and four are right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from formats.family.layout import Atom
from formats.family.roles import EXPERT
from quant.scheme import Scheme

PARTED = ("o_proj", "out_proj", "down_proj")
WAYS = (2, 4, 8)
GROUPS = (64, 32)


def rank_notes(chosen: Iterable[tuple[Atom, Scheme]]) -> Iterator[str]:
    """Yield a note for each kind of weight whose groups engines or up to 8 ranks cannot share."""
    kinds = {
        (atom.name.rsplit(".", 1)[-1], scheme.name, atom.shape[-1], group, atom.role == EXPERT)
        for atom, scheme in chosen
        if (group := _group(scheme)) and atom.name.endswith(PARTED)
    }
    for name, scheme, columns, group, expert in sorted(kinds):
        if expert and columns == group:
            yield (
                f"{name} of experts ({scheme}): {columns} columns are one single group, which "
                f"vLLM 0.26 computes wrongly: use a smaller quantize.group"
            )
        else:
            yield from _shared(name, scheme, columns, group)


def _shared(name: str, scheme: str, columns: int, group: int) -> Iterator[str]:
    ways = next((w for w in WAYS if columns % (w * group)), None)
    if ways and not columns % group:
        smaller = next((g for g in GROUPS if g < group and not columns % (WAYS[-1] * g)), None)
        other = f", or quantize.group {smaller} for up to {WAYS[-1]}" if smaller else ""
        yield (
            f"{name} ({scheme}): {columns} columns are not whole groups of {group} for each of "
            f"{ways} tensor-parallel ranks: use fewer{other}"
        )


def _group(scheme: Scheme) -> int | None:
    """Return the columns that share a step, as engines are told of them."""
    entry = scheme.config_entry([])
    size = entry["weights"].get("group_size") if entry else None
    return size if isinstance(size, int) and size > 1 else None
