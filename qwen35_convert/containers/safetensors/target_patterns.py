r"""Patterns that name the modules of a group: `re:.*layers\.\d+\.mlp\.(down_proj|up_proj)$`.

Engines match them from the beginning of a name (`re.match`), under namespaces of their own, so they
start with `.*`. A number stands for all layers unless another group has the same modules of others;
then the layers are listed. Where a layer of the MTP head and the decoder layer of the same number
are in two groups, patterns say which they mean. What is in `ignore` is left alone whatever a
pattern says.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

MTP = "mtp."
IN_MTP, IN_DECODER = r"mtp\.", r"(?<!mtp\.)"
LAYER = re.compile(r"layers\.(\d+)\.(?:(.+)\.)?([^.]+)")


class _Kind(NamedTuple):
    """Modules of one kind in all layers: where they are in a layer, with `#` for numbers.

    before  the pattern of what precedes `layers`, where that matters
    """

    parent: str
    last: str
    before: str = ""


def target_patterns(modules: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the patterns of each group; `modules` are the full names that it holds."""
    apart = _of_two_groups(modules)
    layers = {group: _by_kind(names, apart) for group, names in modules.items()}
    groups_of: dict[_Kind, int] = defaultdict(int)
    for kinds in layers.values():
        for kind in kinds:
            groups_of[kind] += 1
    shared = {kind for kind, count in groups_of.items() if count > 1}
    return {group: _patterns(kinds, shared) for group, kinds in layers.items()}


def _of_two_groups(modules: Mapping[str, Sequence[str]]) -> set[_Kind]:
    """Return the kinds that have a layer of one number in two groups."""
    groups: dict[tuple[_Kind, str], set[str]] = defaultdict(set)
    for group, names in modules.items():
        for kind, numbers in _by_kind(names, ()).items():
            for number in numbers:
                groups[kind, number].add(group)
    return {kind for (kind, number), its in groups.items() if number and len(its) > 1}


def _by_kind(names: Sequence[str], apart: Collection[_Kind]) -> dict[_Kind, set[str]]:
    """Return the layers of each kind of module; a module outside of layers is its own kind."""
    kinds: dict[_Kind, set[str]] = defaultdict(set)
    for name in names:
        match = LAYER.search(name)
        if match is None:
            kinds[_Kind("", name.rsplit(".", 1)[-1])].add("")
        else:
            parent = re.sub(r"\d+", "#", match[2] or "")
            kind = _Kind(parent, match[3])
            if kind in apart:
                kind = kind._replace(before=IN_MTP if name.startswith(MTP) else IN_DECODER)
            kinds[kind].add(match[1])
    return kinds


def _patterns(kinds: Mapping[_Kind, set[str]], shared: set[_Kind]) -> list[str]:
    lasts: dict[tuple[str, str], list[str]] = defaultdict(list)
    for kind, layers in sorted(kinds.items()):
        lasts[_head(kind, layers, listed=kind in shared)].append(kind.last)
    return [f"re:.*{head}{_either(last)}$" for (head, _), last in lasts.items()]


def _head(kind: _Kind, layers: set[str], *, listed: bool) -> tuple[str, str]:
    """Return the pattern up to the last part, and what keeps it apart from others."""
    if layers == {""}:
        return "", kind.last
    number = _either(sorted(layers, key=int)) if listed else r"\d+"
    parent = re.escape(kind.parent).replace(r"\#", r"\d+")
    head = rf"{kind.before}layers\.{number}\."
    return (rf"{head}{parent}\." if parent else head), ""


def _either(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"({'|'.join(words)})"
