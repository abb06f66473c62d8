"""The frame of a chart: its box in the SVG, grid lines, the figures on them, what they mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from qwen35_convert.page.element import Node, add, element
from qwen35_convert.page.scale import Scale, short

Places = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Frame:
    """A chart of this width and height; margins are left around the box of the data."""

    width: float
    height: float
    left: float
    top: float
    right: float
    bottom: float

    @property
    def across(self) -> tuple[float, float]:
        """The places at which the box begins and ends."""
        return self.left, self.width - self.right

    @property
    def upward(self) -> tuple[float, float]:
        """The places of the box's foot and head."""
        return self.height - self.bottom, self.top


def picture(frame: Frame, title: str, description: str, *children: Node | None) -> Node:
    """Return an SVG with what it shows in words, for those who do not see it."""
    svg = element("svg", viewBox=f"0 0 {frame.width:g} {frame.height:g}", role="img")
    svg.set("width", f"{frame.width:g}")
    return add(svg, [element("title", title), element("desc", description), *children])


def y_axis(frame: Frame, scale: Scale, name: str) -> Node:
    """Return the lines of a vertical axis with their figures, and its name above them."""
    left, right = frame.across
    group = element("g", element("text", name, x=0.0, y=frame.top - 14, class_="name"))
    group.set("class", "axis")
    for value in scale.ticks():
        y = scale(value)
        line = element("line", x1=left, x2=right, y1=y, y2=y, class_="grid")
        add(group, [line, _beside(left, y, short(value))])
    return add(group, [_beside(left, frame.upward[0], "0") if scale.none else None])


def _beside(left: float, y: float, text: str) -> Node:
    return element("text", text, x=left - 8, y=y + 4, text_anchor="end")


@dataclass(frozen=True, slots=True)
class Below:
    """Figures under a chart: values, how they are told, what they mean."""

    values: Sequence[float]
    tell: Callable[[float], str]
    name: str


def x_axis(frame: Frame, scale: Places, below: Below) -> Node:
    """Return the foot of the box, the figures under it, and its name."""
    return add(element("g", class_="axis"), _x_parts(frame, scale, below))


def _x_parts(frame: Frame, scale: Places, below: Below) -> Iterator[Node]:
    foot, (left, right) = frame.upward[0], frame.across
    yield element("line", x1=left, x2=right, y1=foot, y2=foot, class_="foot")
    for value in below.values:
        x = scale(value)
        yield element("line", x1=x, x2=x, y1=foot, y2=foot + 5, class_="foot")
        yield element("text", below.tell(value), x=x, y=foot + 19, text_anchor="middle")
    yield element("text", below.name, x=right, y=foot + 38, text_anchor="end", class_="name")
