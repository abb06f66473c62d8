"""How an artifact looks wherever it is shown: one of eight colours, then the same ones dashed."""

from __future__ import annotations

from qwen35_convert.page.element import Node, element

COLOURS = 8
MOST_LETTERS = 33
DASHES = ("", " dash-2", " dash-3", " dash-4")


def colour(number: int) -> str:
    """Return the classes of the artifact in this place of the table, from 0."""
    return f"c{number % COLOURS + 1}{DASHES[number // COLOURS % len(DASHES)]}"


def shortened(name: str, most: int = MOST_LETTERS) -> str:
    """Return a name for a picture, its middle left out if it is long."""
    half = (most - 1) // 2
    return name if len(name) <= most else f"{name[:half]}\u2026{name[-half:]}"


def swatch(number: int) -> Node:
    """Return a short piece of an artifact's line, to stand before its name."""
    line = element("line", x1=1, x2=21, y1=6, y2=6, class_=f"line {colour(number)}")
    dot = element("circle", cx=11, cy=6, r=4, class_=f"mark on {colour(number)}")
    return element("svg", line, dot, viewBox="0 0 22 12", width=22, height=12, class_="swatch",
                   aria_hidden="true")  # fmt: skip
