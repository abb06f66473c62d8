"""KL against size: a point for each artifact, those on the frontier joined by a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite

from qwen35_convert.comparison.result import Entry
from qwen35_convert.page.axes import Below, Frame, picture, x_axis, y_axis
from qwen35_convert.page.element import Node, add, element
from qwen35_convert.page.labels import Ground, place_labels
from qwen35_convert.page.marks import colour, shortened
from qwen35_convert.page.scale import Scale, errors_scale, figure, short, sizes_scale
from qwen35_convert.sizes import size_text

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
RADIUS, LETTERS = 5.5, 13.0


@dataclass(frozen=True, slots=True)
class _Point:
    """One artifact; number is its place in the table, from 0."""

    entry: Entry
    number: int
    x: float
    y: float


def frontier_chart(entries: Sequence[Entry], frame: Frame) -> Node | None:
    """Return the chart; None if no artifact's predictions were measured."""
    measured = [(i, one) for i, one in enumerate(entries) if isfinite(one.kl)]
    if not measured:
        return None
    sizes = sizes_scale([one.report.size.model for _, one in measured], *frame.across)
    known = [x for _, one in measured for x in (one.kl, one.kl + _error(one))]
    errors = errors_scale(known, *frame.upward)
    points = [_Point(one, i, sizes(one.report.size.model), errors(one.kl)) for i, one in measured]
    unit, name = next((u for u in UNITS if sizes.high >= u[0]), UNITS[-1])
    below = Below(
        sizes.ticks(), lambda value: short(value / unit), f"language model, {name} \u2192"
    )
    return picture(
        frame,
        "Mean KL divergence against size",
        "; ".join(_told(point.entry) for point in points),
        y_axis(frame, errors, "\u2191 mean KL, nats per token"),
        x_axis(frame, sizes, below),
        _bits(frame, sizes, points[0].entry),
        _frontier(points),
        add(element("g"), [_bar(point, errors) for point in points]),
        add(element("g"), [_mark(point) for point in points]),
        _names(points, frame),
    )


def _error(one: Entry) -> float:
    """Return the standard error of the mean KL, 0 if it is not known."""
    return float(one.figures()["kl_stderr"] or 0.0)


def _told(one: Entry) -> str:
    size, kl = size_text(one.report.size.model), figure(one.kl)
    ending = ", on the frontier" if one.frontier else ""
    return f"{one.name}: {size}, {one.report.size.bits:.2f} bits, KL {kl}{ending}"


def _bits(frame: Frame, sizes: Scale, one: Entry) -> Node:
    """Return a second row of figures: what sizes are in bits per weight."""
    weights, (left, right) = one.report.size.weights, frame.across
    scale = Scale(8 * sizes.low / weights, 8 * sizes.high / weights, left, right)
    head, group = frame.upward[1], element("g", class_="axis")
    name = element("text", "bits per weight \u2192", x=right, y=head - 14, text_anchor="end")
    name.set("class", "name")
    for value in scale.ticks():
        x = scale(value)
        tick = element("line", x1=x, x2=x, y1=head, y2=head + 5, class_="foot")
        add(group, [tick, element("text", short(value), x=x, y=head + 18, text_anchor="middle")])
    return add(group, [element("line", x1=left, x2=right, y1=head, y2=head, class_="grid"), name])


def _steps(points: Sequence[_Point]) -> list[tuple[float, float]]:
    """Return the corners of the frontier, drawn as steps: between two artifacts there is none."""
    best = [point for point in points if point.entry.frontier]
    corners = [(point.x, point.y) for point in best[:1]]
    for before, point in pairwise(best):
        corners += [(point.x, before.y), (point.x, point.y)]
    return corners


def _frontier(points: Sequence[_Point]) -> Node:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in _steps(points))
    return element("polyline", points=path, class_="frontier")


def _bar(point: _Point, errors: Scale) -> Node:
    """Return the standard error, up and down."""
    kl, error = point.entry.kl, _error(point.entry)
    low, high = errors(kl - error), errors(kl + error)
    look = f"bar {colour(point.number)}"
    return element("line", x1=point.x, x2=point.x, y1=low, y2=high, class_=look)


def _mark(point: _Point) -> Node:
    look = f"mark {'on' if point.entry.frontier else 'off'} {colour(point.number)}"
    title = element("title", _told(point.entry))
    return element("circle", title, cx=point.x, cy=point.y, r=RADIUS, class_=look)


def _names(points: Sequence[_Point], frame: Frame) -> Node:
    """Return the names beside the points, those of the frontier first; some may find no place."""
    (left, right), (foot, head) = frame.across, frame.upward
    lines = [
        (min(x, to_x) - 1, min(y, to_y) - 1, max(x, to_x) + 1, max(y, to_y) + 1)
        for (x, y), (to_x, to_y) in pairwise(_steps(points))
    ]
    names = [(point.x, point.y, shortened(point.entry.name)) for point in points]
    first = sorted(range(len(points)), key=lambda i: not points[i].entry.frontier)
    ground = Ground((left, head + 22, right, foot), lines)
    labels = place_labels([names[i] for i in first], ground, LETTERS)
    group = element("g", class_="labels")
    for i, label in zip(first, labels, strict=True):
        if label is not None:
            look = "label" if points[i].entry.frontier else "label weak"
            text = element("text", label.text, x=label.x, y=label.y, text_anchor=label.anchor)
            text.set("class", look)
            group.append(text)
    return group
