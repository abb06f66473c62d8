"""KL against bits a weight as an SVG: a panel for each model, a line for each tool."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree import ElementTree

from qwen35_convert.page.axes import Below, Frame, picture, x_axis, y_axis
from qwen35_convert.page.element import Node, add, element
from qwen35_convert.page.page import STYLE
from qwen35_convert.page.scale import errors_scale, figure, short, sizes_scale

Line = dict[str, Any]
TOOLS = {
    "mix": ("our mixes", "c3"), "gptq": ("our mixes, GPTQ", "c7"),
    "llama.cpp": ("llama.cpp's mixes", "c2"),
    "auto-round": ("AutoRound", "c4"), "mlx": ("mlx-lm", "c5"),
    "recipe": ("our recipes, folders", "c6"),
    "fit-folder": ("our fits, folders", "c8"), "fit": ("our fits, GGUF", "c1"),
}  # fmt: skip
PANEL = Frame(500.0, 420.0, left=62.0, top=66.0, right=14.0, bottom=52.0)
LEGEND, RADIUS, LETTER = 34.0, 3.5, 7.2
# Not every reader of SVG knows variables, so the page's colours are put in by their names.
RULES = """
text {{ font: 12px system-ui, sans-serif; fill: {soft}; }}
.name {{ fill: {ink}; }} .model {{ fill: {ink}; font-weight: 600; font-size: 14px; }}
.grid {{ stroke: {grid}; }} .foot {{ stroke: {soft}; }} .ground {{ fill: {page}; }}
.line {{ fill: none; stroke-width: 1.2; }} .line.fit {{ stroke-width: 2.6; }}
.mark {{ fill: {page}; stroke-width: 1.6; }}
"""
SERIES = ".{name} {{ stroke: {colour}; }}\n"
DARK = "@media (prefers-color-scheme: dark) {"


def picture_of(lines: Sequence[Line]) -> str:
    """Return the picture of the tools above as it is written to a file."""
    lines = [one for one in lines if one["tool"] in TOOLS]
    models = sorted({one["model"] for one in lines})
    width, height = PANEL.width * len(models), PANEL.height + LEGEND
    svg = element("svg", viewBox=f"0 0 {width:g} {height:g}", xmlns="http://www.w3.org/2000/svg")
    svg.set("width", f"{width:g}")
    ground = element("rect", width=width, height=height, class_="ground")
    add(svg, [element("style", _style()), ground, *_legend(lines)])
    for i, model in enumerate(models):
        panel = _panel([one for one in lines if one["model"] == model], model)
        panel.set("x", f"{i * PANEL.width:g}")
        panel.set("y", f"{LEGEND:g}")
        panel.set("height", f"{PANEL.height:g}")
        svg.append(panel)
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def _style() -> str:
    """Return the rules in the page's colours, then in those of its dark scheme."""
    light, _, rest = STYLE.read_text(encoding="utf-8").partition(DARK)
    return f"{_rules(light)}{DARK}{_rules(rest.partition('* {')[0])}}}\n"


def _rules(page: str) -> str:
    colours = dict(re.findall(r"--(\w+): (#\w+);", page))
    series = (SERIES.format(name=c, colour=colours[c]) for _, c in TOOLS.values())
    fit = f".mark.fit {{ fill: {colours[TOOLS['fit'][1]]}; }}\n"
    return RULES.format(**colours) + "".join(series) + fit


def _legend(lines: Sequence[Line]) -> Iterator[Node]:
    x, there = PANEL.left, {one["tool"] for one in lines}
    for tool, (name, colour) in reversed(TOOLS.items()):
        if tool in there:
            yield element("circle", cx=x, cy=22, r=RADIUS, class_=f"mark {tool} {colour}")
            yield element("text", name, x=x + 9, y=26, class_="name")
            x += 30 + LETTER * len(name)


def _panel(lines: Sequence[Line], model: str) -> Node:
    bits = sizes_scale([one["bits"] for one in lines], *PANEL.across)
    errors = errors_scale([one["kl"] for one in lines], *PANEL.upward)
    below = Below(bits.ticks(), short, "bits per weight of the language model \u2192")
    series = [add(element("g"), _series(lines, tool, (bits, errors))) for tool in TOOLS]
    name = element("text", model, x=PANEL.left, y=24, class_="model")
    axes = y_axis(PANEL, errors, "\u2191 mean KL, nats per token"), x_axis(PANEL, bits, below)
    return picture(
        PANEL, f"{model}: mean KL against bits per weight", _told(lines), name, *axes, *series
    )


def _told(lines: Sequence[Line]) -> str:
    return "; ".join(
        f"{TOOLS[one['tool']][0]}, {one['name']}: {one['bits']:.2f} bits, KL {figure(one['kl'])}"
        for one in sorted(lines, key=lambda one: (one["tool"], one["bits"]))
    )


def _series(lines: Sequence[Line], tool: str, scales: tuple[Any, Any]) -> Iterator[Node]:
    """Yield the line of a tool from its smallest artifact to its largest, and their marks."""
    own = sorted((one for one in lines if one["tool"] == tool), key=lambda one: one["bits"])
    places = [(scales[0](one["bits"]), scales[1](one["kl"])) for one in own]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    look = f"{tool} {TOOLS[tool][1]}"
    yield element("polyline", points=path, class_=f"line {look}")
    for one, (x, y) in zip(own, places, strict=True):
        told = f"{one['name']}: {one['bits']:.2f} bits, KL {figure(one['kl'])}"
        yield element("circle", element("title", told), cx=x, cy=y, r=RADIUS, class_=f"mark {look}")
