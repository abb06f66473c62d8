"""From figures to places on a logarithmic scale, and the figures that are named on it.

place = start + log(value / low) / log(high / low) * (stop - start)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, inf, isfinite, log10

# Decades of a scale, at most: what is named within each.
BETWEEN = (
    (0.5, (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9)),
    (1.0, (1, 1.5, 2, 3, 4, 5, 6, 8)),
    (2.5, (1, 2, 5)),
    (5.0, (1, 3)),
    (inf, (1,)),
)
# Below this an error is none: sums in float32 leave as much.
FLOOR = 1e-6
# How far the foot is under the least error, where what is none stands at it.
BELOW = 3.0
HEADROOM = 2.0
ROOM = 1.15  # at either end of sizes, at least: there is a round value on every scale


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from low to high, both above 0, at places from start to stop.

    none  some errors are none: they stand at the foot
    """

    low: float
    high: float
    start: float
    stop: float
    none: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a value; outside the scale that of its end."""
        inside = min(max(value, self.low), self.high)
        share = log10(inside / self.low) / log10(self.high / self.low)
        return self.start + share * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Return round values on the scale: powers of ten, and some between them if it is short."""
        decades = log10(self.high / self.low)
        between = next(steps for most, steps in BETWEEN if decades <= most)
        powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
        every = (float(f"{step}e{power}") for power in powers for step in between)
        least = self.low * BELOW**0.5 if self.none else self.low
        return [x for x in every if least <= x <= self.high]


def sizes_scale(values: Iterable[float], start: float, stop: float) -> Scale:
    """Return a scale of sizes, with some room beyond them."""
    known = [max(x, 1.0) for x in values]
    return Scale(min(known) / ROOM, max(known) * ROOM, start, stop)


def errors_scale(values: Iterable[float], start: float, stop: float) -> Scale:
    """Return a scale of errors; what is none stands at its foot."""
    known = [x for x in values if isfinite(x)]
    errors = [x for x in known if x > FLOOR] or [FLOOR]
    none = len(errors) < len(known) or errors == [FLOOR]
    low, high = min(errors) / (BELOW if none else 1.4), max(errors) * HEADROOM
    return Scale(low, max(high, low * 4), start, stop, none)


def figure(value: float) -> str:
    """Return a value to three digits: 0.0123, 2.50, 1.2e-6."""
    if value == 0 or not isfinite(value):
        return "0" if value == 0 else "not finite"
    if 1e-4 <= abs(value) < 1e6:
        return f"{value:.{max(0, 2 - floor(log10(abs(value))))}f}"
    mantissa, power = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(power)}"


def short(value: float) -> str:
    """Return a round value as an axis names it: 0.01, 2.5, 1e-5."""
    return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e")
