"""How engines read the list of modules that are not quantised; one function an engine.

Each reads a list and answers for one module after another: will this engine leave it in its stored
type? A list is right when all three leave every unquantised linear alone and none leaves a
quantised one. Lists and models have hundreds of names each, experts tens of thousands: a list is
read once, and no answer walks through it name by name.

Sources: transformers `should_convert_module`; vLLM `is_layer_skipped` (fp8) and compressed-tensors
`ignore`; SGLang `is_layer_skipped`. The name of an expert's module holds `.experts.`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from itertools import combinations

from formats.quant_methods import MODELOPT

PLAIN = re.compile(r"[\w.-]+")
BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
Leaves = Callable[[str], bool]
Engines = dict[str, Callable[[Sequence[str]], Leaves]]


def _experts_of(module: str) -> str | None:
    head, separator, _ = module.partition(".experts.")
    return f"{head}.experts" if separator else None


def vllm_leaves(entries: Sequence[str]) -> Leaves:
    """Match whole names; an entry with `experts` covers the block of experts it contains."""
    names, matches = frozenset(entries), _matcher(_patterns(entries))
    of_experts = [entry for entry in entries if "experts" in entry]

    @cache
    def covered(container: str) -> bool:
        return any(container in entry for entry in of_experts)

    def leaves(module: str) -> bool:
        container = _experts_of(module)
        return covered(container) if container else module in names or matches(module)

    return leaves


def transformers_leaves(entries: Sequence[str]) -> Leaves:
    """Match a regular expression up to a module boundary, or a suffix."""
    patterns, suffixes = [entry.removeprefix("re:") for entry in entries], tuple(entries)
    plain = "|".join(filter(PLAIN.fullmatch, patterns))
    others = [pattern for pattern in patterns if not PLAIN.fullmatch(pattern)]
    bounded = [f"(?:{one}){BOUNDARY}" for one in [*filter(None, [plain]), *others]]
    matches = _matcher(bounded)
    return lambda module: module.endswith(suffixes) or matches(module)


def sglang_leaves(entries: Sequence[str]) -> Leaves:
    """Match a run of whole dotted segments anywhere in the name."""
    names, matches = frozenset(entries), _matcher(_patterns(entries))
    return lambda module: not names.isdisjoint(_runs(module)) or matches(module)


def modelopt_leaves(entries: Sequence[str]) -> Leaves:
    """Match a part of the name, or a glob: vLLM's way with ModelOpt's lists."""
    return lambda module: any(entry in module or fnmatchcase(module, entry) for entry in entries)


def _patterns(entries: Sequence[str]) -> list[str]:
    return [entry.removeprefix("re:") for entry in entries if entry.startswith("re:")]


def _matcher(patterns: Sequence[str]) -> Leaves:
    """Return whether a name begins with one of these patterns."""
    compiled = [re.compile(pattern) for pattern in patterns]
    return lambda module: any(pattern.match(module) for pattern in compiled)


def _runs(module: str) -> Iterator[str]:
    """Yield every run of a name's dotted segments."""
    segments = module.split(".")
    for start, stop in combinations(range(len(segments) + 1), 2):
        yield ".".join(segments[start:stop])


ENGINES: Engines = {
    "vLLM": vllm_leaves,
    "transformers": transformers_leaves,
    "SGLang": sglang_leaves,
}
# Engines of methods whose lists only some read.
ENGINES_OF: dict[str, Engines] = {MODELOPT: {"vLLM": modelopt_leaves}}
