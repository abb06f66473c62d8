"""How engines read the list of modules that are not quantised; one function an engine.

Each answers for one module: will this engine leave it in its stored type? A list is right when all
three leave every unquantised linear alone and none leaves a quantised one.

Sources: transformers `should_convert_module`; vLLM `is_layer_skipped` (fp8) and compressed-tensors
`ignore`; SGLang `is_layer_skipped`. The name of an expert's module holds `.experts.`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase


def _experts_of(module: str) -> str | None:
    head, separator, _ = module.partition(".experts.")
    return f"{head}.experts" if separator else None


def vllm_leaves(module: str, entries: Sequence[str]) -> bool:
    """Match whole names; an entry with `experts` covers the block of experts it contains."""
    container = _experts_of(module)
    if container:
        return any("experts" in entry and container in entry for entry in entries)
    patterns = [entry.removeprefix("re:") for entry in entries if entry.startswith("re:")]
    return module in entries or any(re.match(pattern, module) for pattern in patterns)


def transformers_leaves(module: str, entries: Sequence[str]) -> bool:
    """Match a regular expression up to a module boundary, or a suffix."""
    return any(
        re.match(rf"(?:{entry.removeprefix('re:')})(?:(?<=\.)|(?=\.|$))", module)
        or module.endswith(entry)
        for entry in entries
    )


def sglang_leaves(module: str, entries: Sequence[str]) -> bool:
    """Match a run of whole dotted segments anywhere in the name."""
    dotted = f".{module}."
    patterns = [entry.removeprefix("re:") for entry in entries if entry.startswith("re:")]
    return any(f".{entry}." in dotted for entry in entries) or any(
        re.match(pattern, module) for pattern in patterns
    )


def modelopt_leaves(module: str, entries: Sequence[str]) -> bool:
    """Match a part of the name, or a glob: vLLM's way with ModelOpt's lists."""
    return any(entry in module or fnmatchcase(module, entry) for entry in entries)


Engines = dict[str, Callable[[str, Sequence[str]], bool]]
ENGINES: Engines = {
    "vLLM": vllm_leaves,
    "transformers": transformers_leaves,
    "SGLang": sglang_leaves,
}
# Engines of methods whose lists only some read.
ENGINES_OF: dict[str, Engines] = {"modelopt": {"vLLM": modelopt_leaves}}
