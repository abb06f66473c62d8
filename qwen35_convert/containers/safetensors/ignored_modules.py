"""The list of modules that are not quantised, held against the tensors as each engine would.

A quantization_config may hold it under two names; engines differ in which they read first, so each
list must be right by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from formats.checkpoint import Checkpoint
from formats.family.layout import Atom
from formats.family.names import normalise
from formats.family.packings import PACKINGS
from formats.family.roles import ROLES
from formats.side_names import CONFIG
from qwen35_convert.containers.safetensors.ignore_rules import ENGINES, ENGINES_OF, PLAIN, Engines
from qwen35_convert.containers.safetensors.modelopt_fields import LISTED, own_file
from qwen35_convert.containers.safetensors.quantization_config import module_of
from qwen35_convert.containers.safetensors.quantization_table import LISTS
from qwen35_convert.failure import Failure

# The field that lists what is quantised.
POSITIVE = "quantized_layers"
LISTED_VISION = ("qkv", "proj", "linear_fc1", "linear_fc2")
# Names that engines give to fused modules; official lists hold some of them.
FUSED_MODULES = ("in_proj_ba", "in_proj_qkvz", "qkv_proj", "gate_up_proj")


def list_failures(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield modules that an engine would take for quantised, or for not, and that are the other."""
    block = artifact.config.quantization
    if block is None or block.get("quant_method") in PACKINGS:  # which have rules of their own
        return
    lists = _lists(block)
    other = ENGINES_OF.get(str(block.get("quant_method")))
    if other is not None:
        # its globs are no regular expressions, and come from a template for all models
        beside = (own_file(artifact) or {}).get(LISTED)
        for listed in [*(lists.values() or [[]]), *([beside] if isinstance(beside, list) else [])]:
            entries = [entry for entry in listed if isinstance(entry, str)]
            yield from _by_engine(artifact, entries, other, block)
        return
    for name, listed in lists.items():
        for i, problem in _unreadable(listed):
            yield Failure(CONFIG, f"quantization_config: {name}[{i}] is {problem}")
    for listed in lists.values() or [[]]:
        entries = [entry for entry in listed if _readable(entry)]
        lost = list(_by_engine(artifact, entries, ENGINES, block))
        yield from lost
        yield from _of_nothing(artifact, entries, other_layouts=not lost)


def _lists(block: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the lists that engines of the method find, by name; an empty second one is none."""
    first, *others = LISTS.get(str(block.get("quant_method")), ("",))
    stated = {first: block[first]} if block.get(first) is not None else {}
    stated |= {name: block[name] for name in others if block.get(name)}
    return {name: one if isinstance(one, list) else [one] for name, one in stated.items()}


def _unreadable(listed: Sequence[Any]) -> Iterator[tuple[int, str]]:
    for i, entry in enumerate(listed):
        if not _readable(entry):
            yield i, f"{entry!r:.120}, expected the name of a module, or a pattern"


def _readable(entry: object) -> bool:
    """Whether it is a name or a pattern: transformers takes every entry for a pattern."""
    if not isinstance(entry, str):
        return False
    if PLAIN.fullmatch(entry):
        return True
    try:
        re.compile(entry.removeprefix("re:"))
    except re.error:
        return False
    return True


def _by_engine(
    artifact: Checkpoint, entries: Sequence[str], engines: Engines, block: Mapping[str, Any]
) -> Iterator[Failure]:
    readers = [(engine, read(entries)) for engine, read in engines.items()]
    for module, quantized in modules_of(artifact).items():
        if not quantized and block.get(POSITIVE):
            continue  # what that does not name is not quantised
        for engine, leaves in readers:
            if leaves(module) == quantized:
                listed = "but is" if quantized else "and is not"
                state = f"is {'' if quantized else 'not '}quantised, {listed} listed"
                yield Failure(module, f"{state} as unquantised under the rule of {engine}")


def _of_nothing(
    artifact: Checkpoint, entries: Sequence[str], *, other_layouts: bool
) -> Iterator[Failure]:
    """Yield entries that name nothing; other_layouts: a name of another layout harms nobody."""
    stored = {module_of(name) for name in artifact.infos()}
    stored |= {module_of(atom.weight) for atom in artifact.layout.atoms.values()}
    if other_layouts:
        stored |= {normalise(module) for module in stored}
    for entry in entries:
        written = [entry, normalise(entry)] if other_layouts else [entry]
        named = any(_names_something(name, stored, artifact) for name in written)
        if not (entry.startswith("re:") or named or _names_what_is_gone(entry, artifact)):
            yield Failure(entry, "is listed as unquantised, but no such module is stored")


def _names_something(entry: str, stored: set[str], artifact: Checkpoint) -> bool:
    if entry.rsplit(".", 1)[-1] in FUSED_MODULES or (entry == "lm_head" and artifact.layout.tied):
        return True
    return entry in stored or any(s.startswith(entry + ".") for s in stored)


def _names_what_is_gone(entry: str, artifact: Checkpoint) -> bool:
    """Whether an entry names vision or MTP, which were dropped as a whole: it harms nobody."""
    head, form = normalise(entry).split(".", 1)[0], artifact.layout.form
    return (head == "visual" and not form.vision) or (head == "mtp" and not form.mtp_layers)


def modules_of(artifact: Checkpoint) -> dict[str, bool]:
    """Map each linear that engines look up to whether it is quantised.

    Of ModelOpt's methods the head is one: vLLM quantises whatever linear is not excluded.
    """
    heads = (artifact.config.quantization or {}).get("quant_method") in ENGINES_OF
    return {
        module_of(atom.weight): atom.quantized
        for atom in artifact.layout.atoms.values()
        if ROLES[atom.role].listed or _vision_linear(atom) or (heads and atom.role == "lm_head")
    }


def _vision_linear(atom: Atom) -> bool:
    last = atom.name.rsplit(".", 1)[-1]
    return atom.role == "vision" and last in LISTED_VISION and len(atom.shape) == 2
