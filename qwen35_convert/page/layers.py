"""Where the error enters: the error of the residual stream after each layer, a line an artifact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from qwen35_convert.comparison.result import Entry
from qwen35_convert.page.axes import Below, Frame, Places, picture, x_axis, y_axis
from qwen35_convert.page.element import Node, add, element
from qwen35_convert.page.labels import apart
from qwen35_convert.page.marks import colour, shortened, swatch
from qwen35_convert.page.scale import Scale, errors_scale, figure

FULL = "full_attention"
LETTERS = 15.0
MOST_DOTS = 40  # layers; of more, dots would hide the line


@dataclass(frozen=True, slots=True)
class _Line:
    """One artifact's errors by layer; number is its place in the table, from 0."""

    entry: Entry
    number: int

    @property
    def errors(self) -> list[float]:
        return [float(layer["relative_error"]) for layer in self.entry.layers]


def layers_chart(entries: Sequence[Entry], frame: Frame, *, named: bool) -> Node | None:
    """Return the chart, None if nothing was measured; named: with names at the ends of lines."""
    lines = [_Line(one, i) for i, one in enumerate(entries) if one.layers]
    if not lines:
        return None
    kinds = [layer["kind"] for layer in lines[0].entry.layers]
    across = _columns(len(kinds), frame)
    errors = errors_scale([x for line in lines for x in line.errors], *frame.upward)
    return picture(
        frame,
        "Error of the residual stream after each layer",
        "; ".join(_told(line) for line in lines),
        _bands(frame, across, kinds),
        y_axis(frame, errors, "\u2191 relative error of the residual stream"),
        x_axis(frame, across, Below(_numbers(len(kinds)), lambda i: f"{i:g}", "layer \u2192")),
        add(element("g"), [_drawn(line, across, errors) for line in lines]),
        _names(lines, frame, across(len(kinds) - 1), errors) if named else None,
    )


def legend(entries: Sequence[Entry]) -> Node:
    """Return which line is whose, as a list."""
    items = [element("li", swatch(i), one.name) for i, one in enumerate(entries) if one.layers]
    return add(element("ul", class_="legend"), items)


def _columns(count: int, frame: Frame) -> Places:
    """Return the places of layers, each in the middle of its column."""
    left, right = frame.across
    return lambda layer: left + (right - left) * (layer + 0.5) / count


def _told(line: _Line) -> str:
    errors = line.errors
    before = [0.0, *errors]
    steps = [after - earlier for earlier, after in zip(before, errors, strict=False)]
    most = max(range(len(steps)), key=lambda i: steps[i])
    return f"{line.entry.name}: {figure(errors[-1])} at the end, grows most in layer {most}"


def _numbers(count: int) -> list[float]:
    """Return the layers that are named below."""
    step = next(s for s in (1, 2, 4, 8, 16, 32, count) if count / s <= 12)
    return [float(i) for i in range(0, count, step)]


def _bands(frame: Frame, across: Places, kinds: Sequence[str]) -> Node:
    """Return a band behind every layer of full attention."""
    (foot, head), group = frame.upward, element("g", class_="bands")
    for i, kind in enumerate(kinds):
        if kind == FULL:
            left, right = across(i - 0.5), across(i + 0.5)
            band = element("rect", x=left, y=head, width=right - left, height=foot - head)
            group.append(band)
    return group


def _drawn(line: _Line, across: Places, errors: Scale) -> Node:
    points = [(across(i), errors(x), i, x) for i, x in enumerate(line.errors) if isfinite(x)]
    group = element("g", element("title", line.entry.name))
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in points)
    look = colour(line.number)
    group.append(element("polyline", points=path, class_=f"line {look}"))
    for x, y, i, error in points if len(points) <= MOST_DOTS else ():
        title = element("title", f"{line.entry.name}, layer {i}: {figure(error)}")
        group.append(element("circle", title, cx=x, cy=y, r=3.0, class_=f"mark on {look}"))
    return group


def _names(lines: Sequence[_Line], frame: Frame, last: float, errors: Scale) -> Node:
    """Return the names of artifacts beside the chart, each led to the end of its line."""
    right, (foot, head) = frame.across[1], frame.upward
    known = [line for line in lines if isfinite(line.errors[-1])]
    ends = [errors(line.errors[-1]) for line in known]
    places = apart(ends, LETTERS, head + 4, foot - 4)
    group = element("g", class_="labels")
    for line, end, place in zip(known, ends, places, strict=True):
        path = f"{last + 5:.1f},{end:.1f} {right:.1f},{end:.1f} {right + 12:.1f},{place:.1f}"
        lead = element("polyline", points=path, class_=f"leader {colour(line.number)}")
        name = element(
            "text", shortened(line.entry.name), x=right + 16, y=place + 4, class_="label"
        )
        add(group, [lead, name])
    return group
