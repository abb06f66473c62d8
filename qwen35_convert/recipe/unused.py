"""What a recipe chooses and none of its schemes leaves open: said, for it changes nothing.

It is no mistake: a recipe that extends another may have another scheme.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from quant.choices import Choices
from quant.registry import SCHEMES
from qwen35_convert.levels import LOGITS
from qwen35_convert.recipe.parts import FORMATS, Verify
from qwen35_convert.recipe.recipe import Recipe

# What only some schemes leave open: its values.
CHOICES: dict[str, tuple[Any, ...]] = {"group": (32, 64, 128), "symmetric": (False, True)}


def unused_notes(recipe: Recipe) -> Iterator[str]:
    """Yield the choices that no scheme of a recipe has."""
    schemes = {recipe.quantize.scheme, *(rule.scheme for rule in recipe.quantize.rules)}
    known = set() if FORMATS[recipe.export.format].mixes else schemes & SCHEMES.keys()
    for field, values in CHOICES.items():
        chosen = getattr(recipe.quantize, field)
        if chosen is not None and not any(_has_choice(name, field, values) for name in known):
            able = " or ".join(name for name in SCHEMES if _has_choice(name, field, values))
            yield (
                f"quantize.{field} is {str(chosen).lower()} and changes nothing: no scheme here "
                f"has that choice, as {able} has"
            )
    yield from _unread_text(recipe.verify)


def _unread_text(gate: Verify) -> Iterator[str]:
    """Yield that no level and no threshold of a recipe reads the text of its proof."""
    measured = gate.level == LOGITS or {gate.max_kl, gate.min_top1} != {None}
    if gate.text != Verify().text and not measured:
        why = f"verify.level is {gate.level} and no threshold is stated"
        yield f"verify.text is {gate.text} and changes nothing: {why}"


def _has_choice(scheme: str, field: str, values: Sequence[Any]) -> bool:
    """Whether a scheme is another one for one of these values than for another."""
    one, *others = (SCHEMES[scheme].with_choices(Choices(**{field: value})) for value in values)
    return any(other != one for other in others)
