"""Where the names of points go: beside them, over no point and no other name if that can be.

Names are placed one after another; each takes, of eight places around its point, the one with the
least in its way, and is left out if that is much. The width of text is estimated: an SVG cannot
measure it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Box = tuple[float, float, float, float]  # left, top, right, bottom
GLYPH, LINE, GAP = 0.56, 1.25, 9.0
MARK = 8.0  # half of a point's width, with what is kept free around it
AVOIDED = 3  # covering a point is so many times worse than covering a name
COVERED = 0.2  # of its area a name may cover what is there
# Places: the side the name is on (-1 left, 0 over the point, 1 right), and above or below.
PLACES = ((1, 0), (-1, 0), (1, -1), (1, 1), (-1, -1), (-1, 1), (0, -1), (0, 1))
ANCHORS = {1: "start", 0: "middle", -1: "end"}


@dataclass(frozen=True, slots=True)
class Label:
    """A name, where its text begins, or ends, or is centred."""

    text: str
    x: float
    y: float
    anchor: str


@dataclass(frozen=True, slots=True)
class Ground:
    """Where labels go: the box that they should not leave, lines that they should not cross."""

    inside: Box
    lines: Sequence[Box]


def place_labels(
    points: Sequence[tuple[float, float, str]], ground: Ground, size: float
) -> list[Label | None]:
    """Return a label for each point (x, y, its name), None if it would cover too much.

    size  of the font
    """
    marks = [(x - MARK, y - MARK, x + MARK, y + MARK) for x, y, _ in points]
    names: list[Box] = []
    labels = []
    for i, (x, y, name) in enumerate(points):
        choices = [(place, _box((x, y), name, place, size)) for place in PLACES]
        others = [*names, *AVOIDED * (marks[:i] + marks[i + 1 :])]
        place, box = min(choices, key=lambda one: _cost(one[1], others, ground))
        at = {1: box[0], 0: x, -1: box[2]}[place[0]]
        fits = _cost(box, others, ground) <= COVERED * _area(box)
        labels.append(Label(name, at, box[3] - 0.3 * size, ANCHORS[place[0]]) if fits else None)
        names += [box] if fits else []
    return labels


def _box(point: tuple[float, float], name: str, place: tuple[int, int], size: float) -> Box:
    (x, y), (side, above) = point, place
    width, height = len(name) * GLYPH * size, LINE * size
    gap = GAP if above == 0 or side == 0 else GAP * 0.6
    left = x + gap if side == 1 else x - gap - width if side == -1 else x - width / 2
    top = y - height / 2 + above * (height / 2 + (gap if side == 0 else gap * 0.9))
    return left, top, left + width, top + height


def _cost(box: Box, others: Sequence[Box], ground: Ground) -> float:
    """Return the area that a box shares with what is there, and much more for what is outside."""
    outside = _area(box) - _shared(box, ground.inside)
    crossed = sum(_shared(box, line) for line in ground.lines)
    return sum(_shared(box, other) for other in others) + crossed + 20 * outside


def _area(box: Box) -> float:
    return max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1])


def _shared(a: Box, b: Box) -> float:
    return _area((max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])))


def apart(places: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Return places moved so that neighbours are `least` apart, between low and high, in order."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    moved = [*places]
    at = low - least
    for i in order:
        moved[i] = at = max(places[i], at + least)
    limit = high
    for i in reversed(order):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - least
    return moved
