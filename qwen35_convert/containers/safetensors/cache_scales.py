"""The scales of an FP8 cache that a recipe asks for: planned by name, as long as nothing is read.

    self_attn.k_scale, self_attn.v_scale    BF16 [1], as compressed-tensors initialises them

for each full-attention layer. The MTP head gets none: engines run its cache in a draft model, whose
loaders do not all know them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.family.cache_scales import SCALED, WRITTEN, attentions
from formats.family.layout import Atom
from formats.tensor import TensorInfo
from qwen35_convert.errors import RecipeError
from qwen35_convert.recipe.parts import NO_CACHE
from qwen35_convert.recipe.recipe import Recipe

if TYPE_CHECKING:
    from quant.scheme import Scheme

KEY = "quantize.kv_cache"
DTYPE, SHAPE = "BF16", (1,)
PROJECTION = "k_proj"
Planned = tuple[str, TensorInfo]


def plan_cache_scales(
    recipe: Recipe, source: Checkpoint, written: Sequence[tuple[Atom, Scheme, str]]
) -> list[Planned]:
    """Return each scale that the recipe asks for, with the stored weight whose file it shares.

    written  (atom, scheme, stored name) of every weight

    RecipeError for a slice of a model.
    """
    if recipe.quantize.kv_cache == NO_CACHE:
        return []
    if recipe.only is not None:
        got = f"is {recipe.quantize.kv_cache}, and only is {recipe.only!r}"
        raise RecipeError(KEY, got, f"{NO_CACHE}: a slice of a model has no cache")
    stored = {atom.name: name for atom, _, name in written}
    keys = [stored[f"{attention}.{PROJECTION}"] for attention in attentions(source.config)]
    return [(weight, info) for weight in keys for info in _beside(weight)]


def _beside(weight: str) -> Iterator[TensorInfo]:
    module = weight.removesuffix(f".{PROJECTION}.weight")
    for what in SCALED:
        yield TensorInfo(f"{module}.{WRITTEN[what]}", DTYPE, SHAPE)


def cache_notes(scales: Sequence[Planned], recipe: Recipe, *, mtp: bool) -> Iterator[str]:
    """Yield what a plan says of its scales."""
    calibrate = recipe.quantize.calibrate
    if not scales or calibrate is None:
        return
    text = calibrate.file or "the bundled text"
    yield (
        f"kv_cache is fp8: {len(scales)} scales of the keys and values of {len(scales) // 2} "
        f"layers, from at most {calibrate.tokens} tokens of {text}; "
        "serve with --kv-cache-dtype fp8"
    )
    yield "transformers has no such cache: it reports the scales as UNEXPECTED and leaves them out"
    if mtp:
        yield "the MTP head's cache has no scales: engines run it at a scale of 1"
