"""Figures as tables: every artifact in a line, and the worst tensors of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from qwen35_convert.comparison.result import Entry
from qwen35_convert.page.element import Node, add, element
from qwen35_convert.page.heat import percent
from qwen35_convert.page.marks import swatch
from qwen35_convert.page.scale import figure
from qwen35_convert.sizes import size_text

DASH = "\u2013"
WORST_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Column:
    """A column: the figure that it shows, its head, what it means, how it is told."""

    key: str
    head: str
    means: str
    tell: Callable[[Any], str]


def _share(value: float) -> str:
    return f"{100 * value:.2f} %" if isfinite(value) else "not finite"


def _ratio(value: float) -> str:
    return f"{value:.4f}" if isfinite(value) else "not finite"


COLUMNS = (
    Column("model_bytes", "Size", "Bytes of the language model, without vision and MTP", size_text),
    Column("bits_per_weight", "Bits", "Bits per weight of the language model", "{:.2f}".format),
    Column("kl_mean", "Mean KL", "Mean KL divergence from the source, nats per token", figure),
    Column("kl_stderr", "\u00b1", "Standard error of the mean KL", figure),
    Column("kl_median", "Median", "Median KL divergence over tokens", figure),
    Column("kl_p999", "99.9 %", "KL divergence that 99.9 % of tokens stay below", figure),
    Column("top1", "Top-1", "Tokens whose likeliest successor is the source's", _share),
    Column("ppl_ratio", "PPL ratio", "Perplexity of the artifact over the source's", _ratio),
)


def summary_table(entries: Sequence[Entry]) -> Node:
    """Return a line for each artifact, the smallest first."""
    heads = [
        _head("Artifact", ""),
        *(_head(column.head, column.means) for column in COLUMNS),
        _head("Verified", "Every tensor is what it should be", "word"),
    ]
    body = add(element("tbody"), [_line(one, i) for i, one in enumerate(entries)])
    return scrolled("All figures", element("thead", add(element("tr"), heads)), body)


def scrolled(name: str, *parts: Node) -> Node:
    """Return a table that is scrolled sideways where it does not fit, with a name for readers."""
    table = element("table", *parts)
    return element("div", table, class_="scroll", tabindex="0", role="region", aria_label=name)


def _head(text: str, means: str, look: str | None = None) -> Node:
    label = element("abbr", text, title=means) if means else text
    return element("th", label, scope="col", class_=look)


def _line(one: Entry, number: int) -> Node:
    figures = one.figures()
    name = element("th", swatch(number), element("span", one.name), scope="row")
    cells = [
        element("td", DASH if figures[c.key] is None else c.tell(figures[c.key]), data_key=c.key)
        for c in COLUMNS
    ]
    passed = element("td", "yes" if one.report.passed else "no",
                     class_="word good" if one.report.passed else "word bad")  # fmt: skip
    line = element("tr", name, *cells, passed)
    if one.frontier:
        line.set("class", "on")
    return line


def worst_tensors(one: Entry, number: int) -> Node | None:
    """Return the tensors of an artifact that lost most, folded under the worst; None: none did."""
    lines = one.worst(WORST_SHOWN)
    if not lines:
        return None
    heads = ("Tensor", "Stored as", "Relative RMS", "Cosine", "Largest error")
    head = add(element("tr"), [element("th", text, scope="col") for text in heads])
    body = add(element("tbody"), [_tensor(line) for line in lines])
    error = f" {percent(lines[0]['relative_rms'])} in {lines[0]['name']}"
    summary = element("summary", swatch(number), element("b", one.name), error)
    box = scrolled(f"Worst tensors, table {number + 1}", element("thead", head), body)
    return element("details", summary, box)


def _tensor(line: dict[str, Any]) -> Node:
    return element(
        "tr",
        element("th", line["name"], scope="row"),
        element("td", line["scheme"], class_="word"),
        element("td", percent(line["relative_rms"])),
        element("td", f"{line['cosine']:.6f}"),
        element("td", figure(line["max_abs"])),
    )
