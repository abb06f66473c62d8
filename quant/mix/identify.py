"""Which mixes a GGUF file's types are: `general.file_type`, told from the tensors.

A file that has, tensor by tensor, the types of a mix is one of that mix and of no other. A file
with exceptions of its own is called after the mix it began with, so of it nothing more is known
than that some tensors have about as many bits as that mix's own type.

Source: `llama_ftype_get_default_type` of llama.cpp's src/llama-quant.cpp at b11434.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quant.ggml import kinds
from quant.mix.choose import FILE_TYPES, choose
from quant.mix.llama_cpp_table import DEFAULTS
from quant.mix.ours_table import FIXED, LADDERS, OWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from quant.mix.tensors import Facts, MixTensor

# The type that a file type begins with, by its number in llama.h.
MAIN_TYPES = {FILE_TYPES[mix]: type_ for mix, type_ in DEFAULTS.items()} | {
    0: "F32", 1: "F16", 24: "IQ1_S", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 40: "Q1_0",
}  # fmt: skip
# Set beside a number that was guessed from the tensors.
GUESSED = 1024
# A mixture's exceptions are a few tenths of its bits; Q4_0 has half of Q8_0's.
NEAR = 1.5


def exact_mixes(
    types: Mapping[str, str], tensors: Sequence[MixTensor], facts: Facts
) -> dict[str, int]:
    """Return the mixes, with their file types, that give every tensor the type it has."""
    return {
        mix: number
        for mix, number in FILE_TYPES.items()
        if any(chosen == types for chosen in _choices(mix, types, tensors, facts))
    }


def _choices(
    mix: str, types: Mapping[str, str], tensors: Sequence[MixTensor], facts: Facts
) -> Iterator[dict[str, str]]:
    """Yield what a mix chooses by llama.cpp's rules and by ours, where that may be these types."""
    for theirs in (True, False):
        if not _may_be(mix, types, tensors, theirs):
            continue
        for imatrix in (False, True):
            known = replace(facts, imatrix=imatrix)
            chosen = choose(mix, tensors, known, like_llama_cpp=theirs)
            yield {name: choice.type for name, choice in chosen.items()}


def _may_be(
    mix: str,
    types: Mapping[str, str],
    tensors: Sequence[MixTensor],
    theirs: bool,  # noqa: FBT001 - private
) -> bool:
    """Whether a tensor has the mix's own type; by our rules, whether all have types of a ladder."""
    if theirs or mix not in LADDERS:
        own = MAIN_TYPES[FILE_TYPES[mix]]
        return any(kinds.fallback(own, t.shape[-1]) == types[t.name] for t in tensors)
    columns = {tensor.shape[-1] for tensor in tensors}
    ladder = {kinds.fallback(type_, width) for type_ in LADDERS[mix] for width in columns}
    return set(types.values()) <= {*ladder, *FIXED.values(), OWN[mix]}


def may_be_called(number: int, types: Iterable[str]) -> bool:
    """Whether weights of these types may be in a file of this file type, with its exceptions."""
    main = MAIN_TYPES.get(number & ~GUESSED)
    if main is None:
        return False
    ratios = (_bits(type_) / _bits(main) for type_ in types)
    return any(1 / NEAR <= ratio <= NEAR for ratio in ratios)


def _bits(name: str) -> float:
    columns, size = kinds.block(name)
    return 8 * size / columns
