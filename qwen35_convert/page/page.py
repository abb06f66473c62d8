"""The page: head, pictures, tables, and a foot that says what was measured and what was not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen35_convert.comparison.result import Comparison, Entry
from qwen35_convert.page.axes import Frame
from qwen35_convert.page.element import Node, add, document, element
from qwen35_convert.page.frontier import frontier_chart
from qwen35_convert.page.heat import Heat, heat_figure, heat_legend
from qwen35_convert.page.layers import layers_chart, legend
from qwen35_convert.page.marks import shortened
from qwen35_convert.page.notes import basis, failures, hint, summary, title
from qwen35_convert.page.tables import summary_table, worst_tensors

STYLE = Path(__file__).parent / "style.css"
# Nothing is asked for, and nothing runs, whatever stands in a name.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
WIDE = Frame(1080.0, 500.0, left=64.0, top=44.0, right=24.0, bottom=56.0)
LEAST_NAMES, GLYPH = 90.0, 9.2
NARROW = Frame(360.0, 400.0, left=50.0, top=44.0, right=10.0, bottom=56.0)
FRONTIER = (
    "Filled points are on the frontier (dashed). Bars show one standard error. Labels that do not "
    "fit are left out; the table lists all artifacts."
)
LAYERS = (
    "Shaded layers use full attention, the others linear attention. A jump shows the layer that "
    "costs most; the error then carries through later layers."
)
ROLES = (
    "Relative RMS error of the weights. Each colour covers errors up to the value below it; all "
    "maps share one scale. Gray: kept unquantised. Blank: no such tensor in the layer."
)


def page_html(comparison: Comparison) -> str:
    """Return the page as it is written to a file."""
    heading = title(comparison)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("link", rel="icon", href="data:,"),
        element("title", heading),
        element("style", STYLE.read_text(encoding="utf-8")),
    )
    header = element("header", element("p", "qwen35 compare", class_="eyebrow"),
                     element("h1", heading), *summary(comparison))  # fmt: skip
    main = add(element("main"), _sections(comparison))
    footer = add(element("footer", element("h2", "How this was measured")), basis(comparison))
    return document(element("html", head, element("body", header, main, footer), lang="en"))


def _sections(comparison: Comparison) -> Iterator[Node]:
    entries = comparison.entries
    if not comparison.passed:
        yield _section("failed", "Not verified", *failures(comparison))
    charts = frontier_chart(entries, WIDE), frontier_chart(entries, NARROW)
    if len(entries) > 1 and None not in charts:
        yield _section("frontier", "KL divergence against size", _figure(*charts, FRONTIER))
    yield _section("table", "All figures", hint(), summary_table(entries))
    lines = (
        layers_chart(entries, _with_names(entries), named=True),
        layers_chart(entries, NARROW, named=False),
    )
    if None not in lines:
        figure = _figure(*lines, LAYERS)
        yield _section("layers", "Where the error enters", figure, legend(entries))
    yield from _by_role(comparison)
    worst = [worst_tensors(one, i) for i, one in enumerate(entries)]
    if any(one is not None for one in worst):
        yield _section("worst", "Worst tensors", *worst)


def _with_names(entries: Sequence[Entry]) -> Frame:
    """Return the frame of a chart with the names of artifacts at its right."""
    longest = max(GLYPH * len(shortened(one.name)) for one in entries)
    return replace(WIDE, height=440.0, right=max(LEAST_NAMES, longest + 24))


def _by_role(comparison: Comparison) -> Iterator[Node]:
    heat = Heat.of(comparison.entries)
    if heat is None:
        return
    maps = [heat_figure(one, heat) for one in comparison.entries if one.report.by_role]
    yield _section("roles", "Error by layer and role", element("p", ROLES), heat_legend(heat),
                   add(element("div", class_="maps"), maps))  # fmt: skip


def _section(name: str, heading: str, *children: Node | None) -> Node:
    label = element("h2", heading, id=f"{name}-title")
    return element("section", label, *children, id=name, aria_labelledby=f"{name}-title")


def _figure(wide: Any, narrow: Any, caption: str) -> Node:
    """Return a chart for wide and one for narrow screens, of which one is shown."""
    return element(
        "figure",
        element("div", wide, class_="wide"),
        element("div", narrow, class_="narrow"),
        element("figcaption", caption),
    )
