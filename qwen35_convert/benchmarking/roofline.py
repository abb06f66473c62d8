"""`bench --plot`: the points on the card's roofline.

x: operations per byte moved; y: operations per second. The roof is bandwidth times intensity, up to
the tensor rates; the distance of a point below it is what the step wastes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from formats.nearest import one_of
from qwen35_convert.benchmarking.bench import Bench
from qwen35_convert.benchmarking.point import Point
from qwen35_convert.durable import check_place, writing
from qwen35_convert.errors import MissingError, RecipeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from runtime.floors import Card

# How the pictures that can be drawn begin.
HEADS = {".png": b"\x89PNG", ".pdf": b"%PDF", ".svg": b"<?xml"}


def check_plot(path: Path) -> None:
    """Refuse a picture of another type, or in the place of another file."""
    if path.suffix not in HEADS:
        raise RecipeError(f"--plot {path}", "is not a picture format", one_of(HEADS))
    check_place(path, HEADS[path.suffix])


def draw_roofline(bench: Bench, path: Path) -> None:
    """Write the picture; its type follows the name. MissingError without matplotlib."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        raise MissingError(
            "--plot: matplotlib is not installed", fix="pip install 'qwen35[report]'"
        ) from None
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    from runtime.floors import card_of

    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    for what, marker in (("decode", "o"), ("prefill", "s")):
        _draw_points(axes, [point for point in bench.points if point.what == what], what, marker)
    card = card_of(bench.device)
    if card is not None:
        _draw_roofs(axes, card)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations per byte",
        ylabel="operations per second",
        title=f"{bench.artifact} on {bench.device}",
    )
    axes.legend()
    with writing(path, "drawing it", "what was there before"):
        figure.savefig(path)
    plt.close(figure)


def _draw_points(axes: Axes, points: Sequence[Point], what: str, marker: str) -> None:
    """Draw the steps of one kind, each with its batch or its tokens."""
    places = [(point.flops / point.bytes_moved, point.flops / point.ms * 1e3) for point in points]
    axes.plot([x for x, _ in places], [y for _, y in places], marker, label=what)
    for point, place in zip(points, places, strict=True):
        size = point.batch if what == "decode" else point.tokens
        axes.annotate(str(size), place, textcoords="offset points", xytext=(6, 4))


def _draw_roofs(axes: Axes, card: Card) -> None:
    """Draw what a card can do at most, by type of number."""
    intensity = [10 ** (i / 20) for i in range(-10, 85)]
    for name, rate in (("BF16", card.bf16_peak), ("FP8", card.fp8_peak)):
        roof = [min(rate, card.bandwidth * x) for x in intensity]
        axes.plot(intensity, roof, linewidth=1, label=f"{card.name} {name}")
