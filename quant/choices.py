"""What a recipe may choose of the schemes that have a choice."""

from __future__ import annotations

from dataclasses import dataclass

from formats.quant_methods import COMPRESSED


@dataclass(frozen=True, slots=True)
class Choices:
    """What is chosen; None: what a scheme usually does.

    scale      the type of FP8's scales
    group      columns that share a step
    symmetric  whether there are no zero points
    dialect    whose names and config are written
    """

    scale: str = "pow2"
    group: int | None = None
    symmetric: bool | None = None
    dialect: str = COMPRESSED


USUAL = Choices()
