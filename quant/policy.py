"""Which weight gets which scheme: ordered globs over our names, first match wins.

    rule that matches  >  protected role: keep  >  linear layer: the default  >  anything else: keep

It is total both ways: every weight is assigned with a reason that can be printed, and a rule that
decides nothing is an error. Roles, not names, say what must never be quantised: the decay and beta
of the delta rule, norms, convolutions, routers and the vision tower lose far more than they weigh.

What loaders fuse, they load with one scheme (q, k, v; gate, up; qkv, z): the members of a group
share theirs, and what one member's shape refuses, none gets.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase, translate
from typing import TYPE_CHECKING

from formats.family.roles import ROLES
from formats.family.rules import RULES
from formats.stored import KEEP
from quant.choices import USUAL, Choices
from quant.errors import QuantError
from quant.registry import get_scheme

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight to assign: `group` is shared by those that loaders fuse into one matrix."""

    name: str
    role: str
    shape: tuple[int, ...]
    group: str | None = None


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """Give the weights whose whole name matches this glob that scheme, or "keep"."""

    match: str
    scheme: str


@dataclass(frozen=True, slots=True)
class Policy:
    """The scheme of linear layers, the rules that come before it, and what was chosen of both."""

    default: str
    rules: tuple[PolicyRule, ...] = ()
    choices: Choices = USUAL


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one weight gets, and why."""

    name: str
    scheme: str
    reason: str


def assign(policy: Policy, weights: Sequence[Weight]) -> list[Assignment]:
    """Return one assignment per weight, in their order.

    Raises QuantError for a scheme that is not known, a rule that decides nothing, hits a protected
    weight or gives FP8 to an embedding, and for a fused group whose members would differ.
    """
    for scheme in (policy.default, *(rule.scheme for rule in policy.rules)):
        if scheme != KEEP:
            get_scheme(scheme, policy.choices)
    winners = first_matches(policy.rules, [weight.name for weight in weights])
    chosen = {weight.name: _choose(weight, winners[weight.name], policy) for weight in weights}
    for group in _groups(weights):
        _check_agree([chosen[weight.name] for weight in group])
        chosen |= _refusals(group, chosen[group[0].name].scheme, policy.choices)
    return [chosen[weight.name] for weight in weights]


def first_matches(
    rules: Sequence[PolicyRule], names: Iterable[str]
) -> dict[str, PolicyRule | None]:
    """Return by each name the first rule that matches it. QuantError if a rule decides nothing."""
    # compiled here: fnmatch itself remembers 256 patterns, and a fit has a rule for each weight
    matchers = [(re.compile(translate(rule.match)).match, rule) for rule in rules]
    winners = {
        name: next((rule for matches, rule in matchers if matches(name)), None) for name in names
    }
    _check_rules_decide(rules, winners)
    return winners


def _choose(weight: Weight, rule: PolicyRule | None, policy: Policy) -> Assignment:
    """Return what rules and roles alone say of one weight."""
    if rule is not None:
        _check_allowed(weight, rule)
        return Assignment(weight.name, rule.scheme, f"rule {rule.match}")
    if ROLES[weight.role].protected:
        return Assignment(weight.name, KEEP, f"protected: {weight.role}")
    if ROLES[weight.role].linear:
        return Assignment(weight.name, policy.default, "default")
    return Assignment(weight.name, KEEP, "kept: no rule names it")


def _groups(weights: Sequence[Weight]) -> list[list[Weight]]:
    """Return the fused groups; any other weight is a group of its own."""
    groups = defaultdict(list)
    for weight in weights:
        groups[weight.group is None, weight.group or weight.name].append(weight)
    return list(groups.values())


def _refusals(group: Sequence[Weight], scheme: str, choices: Choices) -> dict[str, Assignment]:
    """Return "keep" for a whole group if its scheme refuses the shape of one member."""
    if scheme == KEEP:
        return {}
    for weight in group:
        phrase = get_scheme(scheme, choices).refuses(weight.shape)
        if phrase is not None:
            fused = {member.name: f"fused with {weight.name}, {phrase}" for member in group}
            reasons = fused | {weight.name: phrase}
            return {name: Assignment(name, KEEP, f"kept: {why}") for name, why in reasons.items()}
    return {}


def _check_allowed(weight: Weight, rule: PolicyRule) -> None:
    """Raise QuantError if the rule gives a scheme to a weight that may not have it."""
    gives = f"rule {rule.match} gives {rule.scheme} to {weight.name}"
    if ROLES[weight.role].protected and rule.scheme != KEEP:
        raise QuantError(
            f"{gives}, whose role {weight.role} is protected,\n"
            "  expected keep, or a glob that does not match it"
        )
    read = rule.scheme == KEEP or get_scheme(rule.scheme).looked_up
    if ROLES[weight.role].gathered and not read:
        raise QuantError(f"{gives},\n  expected keep: no loader reads an embedding in FP8")


def _check_rules_decide(
    rules: Sequence[PolicyRule], winners: Mapping[str, PolicyRule | None]
) -> None:
    """Raise QuantError for a rule that no weight's name matches, or none that is left to it.

    A rule for what this model lacks and others of the family have is no mistake.
    """
    for rule in rules:
        if any(winner is rule for winner in winners.values()):
            continue
        taken = next((name for name in winners if fnmatchcase(name, rule.match)), None)
        if taken is None:
            if _names_family(rule.match):
                continue
            raise QuantError(
                f"rule {rule.match} matches no weight,\n"
                f"  expected a name like {_nearest(rule.match, winners)}"
            )
        earlier = winners[taken]
        assert earlier is not None, "a name that a rule matches has a winner"
        raise QuantError(
            f"rule {rule.match} decides nothing,\n"
            f"  expected before rule {earlier.match}, which takes {taken}"
        )


def _names_family(match: str) -> bool:
    """Whether a glob names what other models of the family have: experts, MTP, vision."""
    names = (key.removesuffix(".weight").replace("#", "0") for key in RULES)
    return any(fnmatchcase(name, match) for name in names)


def _check_agree(group: Sequence[Assignment]) -> None:
    """Raise QuantError if the members of a fused group have two schemes."""
    if len({member.scheme for member in group}) > 1:
        members = "\n".join(f"  {m.name}  {m.scheme} ({m.reason})" for m in group)
        raise QuantError(
            f"loaders fuse these into one matrix, but they would have two schemes,\n{members}\n"
            "  expected one for all of them"
        )


def _nearest(match: str, names: Iterable[str]) -> str:
    """Return the name most like a glob, with a star for every number."""
    patterns = sorted({re.sub(r"\d+", "*", name) for name in names})
    return "".join(get_close_matches(re.sub(r"\d+", "*", match), patterns, 1, cutoff=0.0))
