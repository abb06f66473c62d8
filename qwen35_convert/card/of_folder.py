"""The card of a folder that is written: from its plan, its source and its receipt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from formats.checkpoint import Checkpoint
from formats.family.roles import VISION
from qwen35_convert.card.card import About, make_card
from qwen35_convert.planning.plan import Plan
from qwen35_convert.serving.artifact import planned

OUT = "OUT"  # what a card calls a folder, whose own name is not in it


def card_of_folder(plan: Plan, source: Checkpoint, receipt: Mapping[str, Any], name: str) -> bytes:
    """Return the card of a folder, which transformers loads; its receipt has this name."""
    return make_card(
        About(
            title=source.name,
            receipt=receipt,
            infos=plan.tensors.values(),
            quantized=any(item.scheme.label is not None for item in plan.items),
            vision=any(item.atom.role == VISION for item in plan.items),
            library="transformers",
            receipt_name=name,
            sides=source.sides,
            served=planned(plan, OUT),
        )
    )
