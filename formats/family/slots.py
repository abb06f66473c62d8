"""Every tensor that a model of the family has: the table of `rules` written out for its sizes.

A `Form` is what checkpoints of one model may still choose: experts fused or split, an MTP head, a
vision tower, a head of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import TYPE_CHECKING

from formats.family.rules import (
    ATTENTION,
    EXPERTS_FUSED,
    EXPERTS_MLX,
    EXPERTS_SPLIT,
    GDN,
    GDN_IN,
    GDN_IN_NEXT,
    HEAD,
    LAYER_NORMS,
    LAYER_PREFIXES,
    MLP,
    MOE,
    MTP,
    TOP,
    VISION,
    VISION_BLOCK,
    TensorRule,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

EXPERT_FORMS = {"split": EXPERTS_SPLIT, "fused": EXPERTS_FUSED, "mlx": EXPERTS_MLX}


@dataclass(frozen=True, slots=True)
class Form:
    """The choices a checkpoint makes within the family."""

    experts: str = "fused"
    mtp_experts: str = "fused"
    mtp_layers: int = 1
    vision: bool = True
    head: bool = True
    gdn_in: str = "split"


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor the family has a place for: its rule, its indices, its shape in numbers."""

    rule: TensorRule
    hub: str
    indices: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """Our name of the tensor."""
        return self.hub.removesuffix(".weight")


def dimension(expression: str, sizes: Mapping[str, int]) -> int:
    """Return the value of a sum of products such as `2*NK*DK+NV*DV`. KeyError for a lost symbol."""
    return sum(
        prod(factor if isinstance(factor, int) else sizes[factor] for factor in term)
        for term in _terms(expression)
    )


@cache
def _terms(expression: str) -> tuple[tuple[int | str, ...], ...]:
    """Return the factors of each term of a sum: numbers and symbols."""
    terms = (term.split("*") for term in expression.replace(" ", "").split("+"))
    return tuple(tuple(int(f) if f.isdigit() else f for f in factors) for factors in terms)


def shape_of(rule: TensorRule, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the rule's shape for these sizes."""
    return _shape(rule.shape, tuple(sizes.items()))


@lru_cache(maxsize=1 << 10)  # all layers of a kind have the same
def _shape(axes: str, sizes: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    known = dict(sizes)
    return tuple(dimension(axis, known) for axis in axes.split(","))


def _slots(
    rules: tuple[TensorRule, ...],
    sizes: Mapping[str, int],
    prefix: str = "",
    index: int | None = None,
) -> Iterator[Slot]:
    own = () if index is None else (index,)
    for rule in rules:
        shape = shape_of(rule, sizes)
        hub = (prefix + rule.hub).replace("{i}", str(index))
        if "{e}" not in hub:
            yield Slot(rule, hub, own, shape)
            continue
        for e in range(sizes["E"]):
            yield Slot(rule, hub.replace("{e}", str(e)), (*own, e), shape)


def layer_rules(
    kind: str, *, moe: bool, experts: str, gdn_in: str = "split"
) -> tuple[TensorRule, ...]:
    """Return the rules of one decoder layer; `kind` is an entry of `layer_types`."""
    gdn = (*(GDN_IN if gdn_in == "split" else GDN_IN_NEXT), *GDN)
    mixer = gdn if kind == "linear_attention" else ATTENTION
    return (*LAYER_NORMS, *mixer, *((*MOE, *EXPERT_FORMS[experts]) if moe else MLP))


def family(sizes: Mapping[str, int], layer_types: tuple[str, ...], form: Form) -> Iterator[Slot]:
    """Yield every tensor that a checkpoint of these sizes and this form holds.

    `sizes` maps the table's symbols to numbers; a model is a mixture of experts when it has E.
    """
    moe = "E" in sizes
    yield from _slots(TOP, sizes)
    for i, kind in enumerate(layer_types):
        rules = layer_rules(kind, moe=moe, experts=form.experts, gdn_in=form.gdn_in)
        yield from _slots(rules, sizes, LAYER_PREFIXES[0], i)
    if form.head:
        yield from _slots(HEAD, sizes)
    if form.mtp_layers:
        yield from _slots(MTP, sizes)
    for i in range(form.mtp_layers):
        rules = layer_rules("full_attention", moe=moe, experts=form.mtp_experts)
        yield from _slots(rules, sizes, LAYER_PREFIXES[1], i)
    if form.vision:
        yield from tower(sizes)


def tower(sizes: Mapping[str, int]) -> Iterator[Slot]:
    """Yield every tensor of a vision tower of these sizes."""
    yield from _slots(VISION, sizes)
    for i in range(sizes["vD"]):
        yield from _slots(VISION_BLOCK, sizes, "", i)
