"""HTML and SVG elements: all text and every attribute is escaped when the page is written.

A child is an element or plain text; there is no way to put in markup that is text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from xml.etree import ElementTree as Xml

from qwen35_convert.heads import PAGE

Node = Xml.Element
# What XML has no place for: control characters, halves of surrogate pairs.
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def element(tag: str, *children: Node | str | None, **attributes: str | float | None) -> Node:
    """Return an element.

    children    None is left out
    attributes  `class_` is class, `stroke_width` stroke-width; None is left out
    """
    node = Xml.Element(tag)
    for key, value in attributes.items():
        if value is not None:
            node.set(key.rstrip("_").replace("_", "-"), _value(value))
    return add(node, children)


def add(node: Node, children: Iterable[Node | str | None]) -> Node:
    """Add children to an element; return it."""
    for child in children:
        if child is None:
            continue
        if isinstance(child, str):
            _add_text(node, NOT_XML.sub("\ufffd", child))
        else:
            node.append(child)
    return node


def document(root: Node) -> str:
    """Return a document as it is written to a file."""
    return f"{PAGE}\n{Xml.tostring(root, encoding='unicode', method='html')}\n"


def _add_text(node: Node, text: str) -> None:
    if len(node):
        node[-1].tail = (node[-1].tail or "") + text
    else:
        node.text = (node.text or "") + text


def _value(value: str | float) -> str:
    if isinstance(value, str):
        return NOT_XML.sub("\ufffd", value)
    return f"{value:.2f}".rstrip("0").rstrip(".")
