"""Which tensors of a source a conversion takes: what every container asks before it plans."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.layout import Atom
from formats.family.names import optional_part
from formats.family.slots import family
from formats.stored import Problem, by_cause, tell
from quant.policy import PolicyRule
from qwen35_convert.errors import RecipeError
from qwen35_convert.planning.copies import check_copies
from qwen35_convert.recipe.parts import FORMATS
from qwen35_convert.recipe.recipe import Recipe

OTHERS = "all but what --only names"
MAX_SHOWN = 5


def check_convertible(source: Checkpoint, recipe: Recipe, gone: Collection[str]) -> None:
    """Raise FormatError for a source that cannot be converted; what is `gone` need not be whole.

    gone  the parts of the model that the recipe drops: vision, mtp
    """
    problems = source.layout.problems_without(gone)
    if problems:
        raise FormatError(_told([_with_way_out(problem, recipe) for problem in problems]))
    if "mtp" not in gone:
        check_copies(source, _way_out("mtp", recipe))


def _told(problems: list[Problem]) -> str:
    causes = by_cause(problems)
    lines = [tell(some) for some in causes[:MAX_SHOWN]]
    if causes[MAX_SHOWN:]:
        lines.append(f"  and   {sum(map(len, causes[MAX_SHOWN:]))} more of other kinds")
    if len(problems) > min(len(causes), MAX_SHOWN):
        lines.append("  all   `qwen35 inspect --json` lists every one")
    return "\n".join(lines)


def _with_way_out(problem: Problem, recipe: Recipe) -> Problem:
    """Return the problem with the flag that leaves its part of the model out."""
    if not problem.part:
        return problem
    way_out = f"{problem.remedy}; or leave it out: {_way_out(problem.part, recipe)}"
    return replace(problem, remedy=way_out)


def _way_out(part: str, recipe: Recipe) -> str:
    """Return the flags that drop a part: layout hub and same name vision."""
    own = FORMATS[recipe.export.format].own_layout
    layout = "--set layout=text " if part == "vision" and not own else ""
    return f"{layout}--set {part}=drop"


def select(
    source: Checkpoint, recipe: Recipe, gone: Collection[str]
) -> tuple[list[Atom], dict[str, int]]:
    """Part the atoms that are kept from those of the parts `gone`, which are counted.

    FormatError if the source cannot be converted without them, RecipeError if `only` names none.
    """
    check_convertible(source, recipe, gone)
    kept, dropped = [], dict.fromkeys((*sorted(gone), OTHERS), 0)
    for atom in _canonical(source, gone):
        part = optional_part(atom.hub)
        if part and part in gone:
            dropped[part] += 1
        elif recipe.only and not fnmatchcase(atom.name, recipe.only):
            dropped[OTHERS] += 1
        else:
            kept.append(atom)
    if not kept:
        raise RecipeError(
            f"only is {recipe.only!r}, which names no tensor, expected a glob such as layers.0.*"
        )
    return kept, {part: count for part, count in dropped.items() if count}


def faults_dropped(source: Checkpoint, gone: Collection[str]) -> Iterator[str]:
    """Yield what is wrong with the parts of the source that are left out."""
    problems = [problem for problem in source.layout.problems if problem.part in gone]
    for first, *more in by_cause(problems):
        others = f", and {len(more)} more like it" if more else ""
        line = first.problem.splitlines()[0]
        yield f"{first.part} is dropped, and is incomplete: {first.tensor} {line}{others}"


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


def _canonical(source: Checkpoint, gone: Collection[str]) -> Iterator[Atom]:
    """Yield the atoms in one order, whatever the layout: the same model gives the same files.

    Of what is `gone`, there are those that the source has.
    """
    form = replace(source.layout.form, experts="split", mtp_experts="split", gdn_in="split")
    for slot in family(source.config.sizes, source.config.layer_types, form):
        atom = source.layout.atoms.get(slot.name)
        assert atom or optional_part(slot.hub) in gone, "what is missing is a problem"
        if atom:
            yield atom
