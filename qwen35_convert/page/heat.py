"""A heat map of each artifact: its error by layer and role, all in the same colours.

    classes   equal steps of log(relative RMS), from the least to the largest of all artifacts

Layers go across; before them what comes before the first layer, behind them what comes after the
last. A role that no artifact quantises has no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite, log10

from formats.family.roles import ROLES
from qwen35_convert.comparison.result import Entry
from qwen35_convert.page.element import Node, add, element
from qwen35_convert.page.scale import FLOOR, figure
from qwen35_convert.verification.figures import RoleError

CLASSES = 9
BEFORE, AFTER = ("embed_tokens",), ("lm_head", "mtp", "visual")
WIDTH, NAMES, ROW, HEAD, FOOT = 340.0, 82.0, 15.0, 4.0, 18.0
Place = str | int
Key = tuple[Place, str]


@dataclass(frozen=True, slots=True)
class Heat:
    """What all heat maps of a page share: columns, rows, and the errors of the classes' ends."""

    columns: tuple[Place, ...]
    roles: tuple[str, ...]
    low: float
    high: float

    @staticmethod
    def of(entries: Sequence[Entry]) -> Heat | None:
        """Return what the errors of these artifacts need; None if nothing is quantised."""
        every = [one for entry in entries for one in entry.report.by_role]
        lossy = [one for one in every if one.relative_rms is not None]
        if not lossy:
            return None
        used = {one.role for one in lossy}
        roles = tuple(role for role in ROLES if role in used)
        shown = [one for one in every if one.role in used]
        places = {_place(one) for one in shown}
        layers = sorted(place for place in places if isinstance(place, int))
        columns = (*_some(BEFORE, places), *layers, *_some(AFTER, places))
        errors = [max(_error(one), FLOOR) for one in lossy if isfinite(_error(one))] or [FLOOR]
        return Heat(columns, roles, min(errors), max(errors))

    def step(self, error: float) -> int:
        """Return the class of an error, from 1; what is not finite is in the last."""
        if not isfinite(error):
            return CLASSES
        width = log10(self.high / self.low) or 1.0
        share = log10(max(error, self.low) / self.low) / width
        return min(CLASSES, 1 + int(share * CLASSES))

    def ends(self) -> list[float]:
        """Return the errors between which classes lie."""
        return [self.low * (self.high / self.low) ** (i / CLASSES) for i in range(CLASSES + 1)]


def heat_figure(entry: Entry, heat: Heat) -> Node:
    """Return the map of one artifact under its name."""
    svg = element("svg", element("title", f"{entry.name}: error by layer and role"),
                  viewBox=f"0 0 {WIDTH:g} {_height(heat):g}", width=int(WIDTH), role="img",
                  class_="heat")  # fmt: skip
    add(svg, [_names(heat), _cells(entry, heat), _numbers(heat)])
    return element("figure", element("figcaption", entry.name), svg)


def heat_legend(heat: Heat) -> Node:
    """Return the classes from the least error to the largest, with the errors at their ends."""
    ends = heat.ends()
    steps = [
        element("li", element("span", class_=f"chip h{i}"), element("span", percent(end)))
        for i, end in enumerate(ends[1:], 1)
    ]
    first = element("li", element("span", class_="chip kept"), element("span", "kept"))
    return add(element("ul", first, class_="classes"), steps)


def percent(error: float) -> str:
    """Return a share in percent, to three digits."""
    return f"{figure(100 * error)} %" if isfinite(error) else "not finite"


def _error(one: RoleError) -> float:
    assert one.relative_rms is not None, "it is quantised"
    return one.relative_rms


def _place(one: RoleError) -> Place:
    return one.place if one.layer is None else one.layer


def _some(names: Sequence[str], places: set[Place]) -> list[Place]:
    return [name for name in names if name in places]


def _height(heat: Heat) -> float:
    return HEAD + ROW * len(heat.roles) + FOOT


def _left(heat: Heat, column: int) -> float:
    return NAMES + (WIDTH - NAMES - 4) * column / len(heat.columns)


def _names(heat: Heat) -> Node:
    rows = enumerate(heat.roles)
    texts = [
        element("text", role, x=NAMES - 6, y=HEAD + ROW * (i + 0.72), text_anchor="end")
        for i, role in rows
    ]
    return add(element("g", class_="axis"), texts)


def _cells(entry: Entry, heat: Heat) -> Node:
    errors: Mapping[Key, RoleError] = {(_place(e), e.role): e for e in entry.report.by_role}
    cells = [
        _cell(errors[place, role], heat, column, row)
        for row, role in enumerate(heat.roles)
        for column, place in enumerate(heat.columns)
        if (place, role) in errors
    ]
    return add(element("g"), cells)


def _cell(one: RoleError, heat: Heat, column: int, row: int) -> Node:
    left, right = _left(heat, column), _left(heat, column + 1)
    gap = 1.0 if right - left > 5 else 0.3
    kept = one.relative_rms is None
    error = "kept" if one.relative_rms is None else percent(one.relative_rms)
    where = one.place if one.layer is None else f"layer {one.layer}"
    return element(
        "rect",
        element("title", f"{where}, {one.role}: {error}"),
        x=left,
        y=HEAD + ROW * row,
        width=right - left - gap,
        height=ROW - 1,
        class_="kept" if kept else f"h{heat.step(_error(one))}",
    )


def _numbers(heat: Heat) -> Node:
    """Return the first layer and some others below the map, and which column is the MTP head."""
    layers = [place for place in heat.columns if isinstance(place, int)]
    step = next(s for s in (1, 2, 4, 8, 16, max(17, len(layers))) if len(layers) / s <= 8)
    foot, group = _height(heat) - 5, element("g", class_="axis")
    for column, place in enumerate(heat.columns):
        if place == "mtp" or (isinstance(place, int) and place % step == 0):
            middle = (_left(heat, column) + _left(heat, column + 1)) / 2
            x, anchor = (WIDTH - 4, "end") if place == "mtp" else (middle, "middle")
            add(group, [element("text", str(place), x=x, y=foot, text_anchor=anchor)])
    return group
