"""What of an artifact decides which engines load it, in the words of the table in `engines`.

An artifact has traits: the names of its tensors, the stored forms of its weights, what else it
holds. Those in `needs` an engine has to know, each of them; of the others it may.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.family.cache_scales import has_fp8_cache
from formats.family.config import read_config
from formats.family.names import HUB, TEXT, optional_part, prefixes
from formats.family.roles import EXPERT, ROLES
from formats.quant_methods import COMPRESSED
from formats.stored import ZEROS

if TYPE_CHECKING:
    from formats.checkpoint import Checkpoint
    from formats.family.config import Config
    from formats.stored import StoredForm
    from qwen35_convert.planning.plan import Plan

GGUF, NEXT = "gguf", "next"
GGUF_FILE, OTHER_NAMES, OTHER_CLASS = "a GGUF file", "names of no class", "a class of other names"
EMBEDDED = "towers inside the file"
PLAIN, BLOCKS, NVFP4_BLOCKS = "plain numbers", "types of ggml", "GGUF with NVFP4"
MOE, MTP, VISION, NO_VISION = "experts", "mtp", "vision", "hub names without vision"
FP8_CACHE, MIXTURE = "fp8 cache", "several forms"
FP8_BLOCK, FP8_BLOCK_PACKED = "fp8-block", "fp8-block of compressed-tensors"
# What a form is called whose config is of another method than its usual one.
OTHERWISE = {(FP8_BLOCK, COMPRESSED): FP8_BLOCK_PACKED}
# Names: what precedes those of the trunk, and the classes that look for them.
NAMES = {
    HUB: ("model.language_model.", (
        "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")),
    TEXT: ("model.", ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")),
    NEXT: ("model.", ("Qwen3NextForCausalLM",)),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Served:
    """An artifact as engines are to be given it.

    path      a path here, or owner/name on the hub
    needs     the traits that an engine has to know
    traits    all of them
    revision  of a repository
    mmproj    path of the file with the vision tower, of a GGUF file
    """

    path: str
    needs: frozenset[str]
    traits: frozenset[str]
    revision: str | None = None
    mmproj: str | None = None


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight as it is stored."""

    role: str
    form: StoredForm
    hub: str
    columns: int
    stored: str


def experts_in(form: str) -> str:
    """Return the trait that weights of experts have this form, or this trait of a form."""
    return f"experts in {form}"


def others_in(form: str) -> str:
    """Return the trait that weights other than those of experts have this form, or its trait."""
    return f"other weights in {form}"


def served(
    source: Checkpoint, path: str, *, revision: str | None = None, mmproj: str | None = None
) -> Served | None:
    """Return an opened artifact; None if no engine makes text of it as it is."""
    if source.layout.problems or source.layout.headless:
        return None
    weights = [
        _Weight(atom.role, atom.form, atom.hub, (atom.whole or atom.shape)[-1], atom.stored)
        for atom in source.layout.atoms.values()
    ]
    if source.container == GGUF:
        needs, more = _blocks(weights), {EMBEDDED} if _embedded(source) else set()
        more |= {VISION} if mmproj else set()
    else:
        names = _names(weights, source.layout.kind, source.config)
        needs, more = (
            {names} | _forms(weights, source.config),
            {*_of_folder(weights, source.config)},
        )
        more |= {NO_VISION} if names == HUB and not source.layout.form.vision else set()
    traits = needs | more | {*_of_any(weights, source.config)}
    return Served(path, frozenset(needs), frozenset(traits), revision, mmproj)


def planned(plan: Plan, path: str) -> Served | None:
    """Return the folder that a plan writes; None if no engine makes text of it (a slice, too)."""
    config = read_config(dict(plan.described))
    if config.headless or plan.recipe.only is not None:
        return None
    weights = [
        _Weight(item.atom.role, item.scheme, item.atom.hub, item.atom.shape[-1], output.name)
        for item in plan.items
        for output in item.outputs[:1]
    ]
    names = _names(weights, HUB if config.nested else TEXT, config)
    needs = {names} | _forms(weights, config)
    traits = needs | {*_of_folder(weights, config)} | {*_of_any(weights, config)}
    return Served(path, frozenset(needs), frozenset(traits))


def _names(weights: Iterable[_Weight], kind: str, config: Config) -> str:
    """Return the trait of the tensors' names: that of the class which config.json names."""
    prefix, classes = NAMES.get(kind, ("", ()))
    if prefixes(weight.stored for weight in weights).get("trunk") != prefix:
        return OTHER_NAMES
    stated = config.raw.get("architectures")
    first = stated[0] if isinstance(stated, list) and stated else None
    return kind if first in classes else OTHER_CLASS


def _quantized(weights: Iterable[_Weight]) -> Iterator[tuple[str, _Weight]]:
    """Yield the weights in codes with the name of their form, without embeddings."""
    for weight in weights:
        if weight.form.label is not None and not ROLES[weight.role].gathered:
            yield weight.form.label, weight


def _forms(weights: Iterable[_Weight], config: Config) -> set[str]:
    method, labels = _method(config), {label for label, _ in _quantized(weights)}
    return {OTHERWISE.get((label, method), label) for label in labels} or {PLAIN}


def _method(config: Config) -> str:
    return str((config.quantization or {}).get("quant_method", ""))


def _blocks(weights: Iterable[_Weight]) -> set[str]:
    """Return what a GGUF file needs; every type but NVFP4 is older than the family."""
    newer = {weight.form.label for weight in weights} & {NVFP4_BLOCKS}
    return {GGUF_FILE, BLOCKS} | {label for label in newer if label}


def _embedded(source: Checkpoint) -> bool:
    return any(info not in source.where for file in source.files.values() for info in file.infos)


def _of_any(weights: Iterable[_Weight], config: Config) -> Iterator[str]:
    if config.moe:
        yield MOE
    yield from {optional_part(weight.hub) for weight in weights} & {MTP, VISION}


def _of_folder(weights: Iterable[_Weight], config: Config) -> Iterator[str]:
    """Yield what is said of quantised weights beside their form."""
    if len(_forms(weights, config)) > 1:
        yield MIXTURE
    yield _method(config)
    if (config.quantization or {}).get("sym") is False:
        yield ZEROS
    if has_fp8_cache(config):
        yield FP8_CACHE
    for label, weight in _quantized(weights):
        traits = weight.form.traits(weight.columns)
        yield from traits
        yield from map(experts_in if weight.role == EXPERT else others_in, (label, *traits))
