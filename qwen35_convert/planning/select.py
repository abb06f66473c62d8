"""Which tensors of a source a conversion takes: what every container asks before it plans."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.layout import Atom
from formats.family.rules import family
from quant.policy import PolicyRule
from qwen35_convert.errors import RecipeError
from qwen35_convert.recipe import Recipe

GROUPS = {"visual": "vision", "mtp": "mtp"}
OTHERS = "all but what --only names"
MAX_SHOWN = 5


def check_convertible(source: Checkpoint) -> None:
    """Raise FormatError for a source that cannot be converted, whatever the recipe."""
    if source.layout.problems:
        raise FormatError(_all_problems(source))


def _all_problems(source: Checkpoint) -> str:
    problems = source.layout.problems
    shown = "\n".join(str(problem) for problem in problems[:MAX_SHOWN])
    more = (
        f"\n  and   {len(problems) - MAX_SHOWN} more; `qwen35 inspect` lists them"
        if len(problems) > MAX_SHOWN
        else ""
    )
    return shown + more


def select(
    source: Checkpoint, recipe: Recipe, gone: Collection[str]
) -> tuple[list[Atom], dict[str, int]]:
    """Part the atoms that are kept from those of the groups `gone`, which are counted.

    RecipeError if `only` names none.
    """
    kept, dropped = [], dict.fromkeys((*sorted(gone), OTHERS), 0)
    for atom in _canonical(source):
        group = GROUPS.get(atom.hub.split(".", 1)[0])
        if group is not None and group in gone:
            dropped[group] += 1
        elif recipe.only and not fnmatchcase(atom.name, recipe.only):
            dropped[OTHERS] += 1
        else:
            kept.append(atom)
    if not kept:
        raise RecipeError(
            f"only is {recipe.only!r}, which names no tensor, expected a glob such as layers.0.*"
        )
    return kept, {group: count for group, count in dropped.items() if count}


def check_whole(stacked: str, count: int, expected: int) -> None:
    """Refuse a slice that takes some weights of a tensor that stacks all experts'. RecipeError."""
    if count != expected:
        raise RecipeError(
            f"only names {count} of the {expected} weights that {stacked} holds in the output\n"
            "  fix   name all, e.g. layers.0.mlp.experts.*, or write them split to a folder"
        )


def policy_rules(recipe: Recipe) -> tuple[PolicyRule, ...]:
    """Return the recipe's rules in their order."""
    return tuple(PolicyRule(rule.match, rule.scheme) for rule in recipe.quantize.rules)


def _canonical(source: Checkpoint) -> Iterator[Atom]:
    """Yield the atoms in one order, whatever the layout: the same model gives the same files."""
    form = replace(source.layout.form, experts="split", mtp_experts="split", gdn_in="split")
    for slot in family(source.config.sizes, source.config.layer_types, form):
        yield source.layout.atoms[slot.name]
