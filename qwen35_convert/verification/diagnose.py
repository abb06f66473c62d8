"""What is wrong with an artifact's tensors, in words that lead to the fault.

`examine` looks at one tensor after the other. What follows from one fault is said once: two layers
or experts that are swapped, a source of other sizes, a source that most tensors differ from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from formats.checkpoint import Checkpoint
from qwen35_convert.failure import Failure
from qwen35_convert.verification.compare import Compared
from qwen35_convert.verification.examine import Cause, Examiner

MAX_EXAMINED = 64
# So many tensors make a model: of fewer, each is named.
FEW = 8
UNPROVEN = "no bound is known of this type, it is unproven"


def wrong_source(artifact: Checkpoint, source: Checkpoint) -> Failure | None:
    """Return the one failure of a source whose tensors cannot be these."""
    ours, theirs = artifact.config, source.config
    kinds = {True: "has experts", False: "is dense"}
    if ours.moe != theirs.moe:
        problem = f"the artifact {kinds[ours.moe]}, the source {kinds[theirs.moe]}"
        return Failure("source", problem)
    if len(ours.layer_types) != len(theirs.layer_types):
        counts = len(ours.layer_types), len(theirs.layer_types)
        problem = f"the artifact has {counts[0]} layers, the source {counts[1]}"
        return Failure("source", f"{problem} ({_field(ours.fields['L'])})")
    odd = [
        f"{_field(ours.fields[key])} {size} (source: {theirs.sizes[key]})"
        for key, size in ours.sizes.items()
        if not key.startswith("v") and theirs.sizes.get(key, size) != size
    ]
    return Failure("source", f"the artifact has {', '.join(odd)}") if odd else None


def _field(where: str) -> str:
    """Return the name of a field whose place is "text_config.head_dim (absent, default)"."""
    return where.removeprefix("text_config.").removesuffix(" (absent, default)")


def explain(
    artifact: Checkpoint, source: Checkpoint, compared: Sequence[Compared]
) -> list[Failure]:
    """Return the failures of compared atoms, each said once and as near to its cause as can be."""
    wrong = {one.name: one for one in compared if one.faults}
    examiner = Examiner(artifact, source)
    # a vision file's tensors are no atoms of the artifact
    there = artifact.layout.atoms.keys() & source.layout.atoms.keys()
    examined = [name for name in _in_turn(wrong) if name in there][:MAX_EXAMINED]
    causes = {name: examiner.examine(name, wrong[name].faults) for name in examined}
    failures, explained = _find_swaps(causes, set(wrong))
    vague = [name for name in wrong if name not in explained and _is_vague(causes.get(name))]
    if len(vague) * 2 > len(compared) > FEW:
        failures.append(_other_model(wrong, vague, causes, len(compared)))
        explained |= set(vague)
    failures += [
        Failure(one.stored, causes[name].text if name in causes else "; ".join(one.faults))
        for name, one in wrong.items()
        if name not in explained
    ]
    unproven = [one for one in compared if one.unproven]
    return failures + [Failure(one.stored, f"is {one.scheme}: {UNPROVEN}") for one in unproven]


def _in_turn(names: Iterable[str]) -> list[str]:
    """Return the first tensor of each layer, then the second of each, and so on."""
    layers: dict[str, list[str]] = defaultdict(list)
    for name in names:
        layers[".".join(name.split(".")[:2])].append(name)
    return [name for turn in zip_longest(*layers.values()) for name in turn if name]


def _is_vague(cause: Cause | None) -> bool:
    return cause is None or cause.vague


def _other_model(
    wrong: dict[str, Compared], vague: list[str], causes: dict[str, Cause], count: int
) -> Failure:
    """Return the one failure of a source that most tensors differ from."""
    some = next((name for name in vague if name in causes), None)
    example = f"; {wrong[some].stored} {causes[some].text}" if some else ""
    problem = f"{len(vague)} of {count} tensors differ from it: another model or revision?"
    return Failure("source", problem + example)


def _find_swaps(causes: dict[str, Cause], wrong: set[str]) -> tuple[list[Failure], set[str]]:
    """Return one failure for each layer or expert that holds another's, and the atoms told by it.

    wrong  every atom that differs, examined or not
    """
    moves: dict[str, dict[str, str]] = defaultdict(dict)
    for name, cause in causes.items():
        for unit, held in _units(name, cause.holds or ""):
            moves[unit][name] = held
    failures: list[Failure] = []
    explained: set[str] = set()
    whole = {unit: _target(unit, names, causes) for unit, names in moves.items()}
    for unit, other in sorted(whole.items(), key=lambda item: item[0].count(".")):
        members = {name for name in wrong if name.startswith(unit + ".")}
        if other is None or members <= explained:
            continue
        back = whole.get(other) == unit
        if back:
            members |= {name for name in wrong if name.startswith(other + ".")}
        explained |= members
        swapped = f"is swapped with {other}" if back else f"holds the values of {other}"
        failures.append(Failure(unit, f"{swapped} ({len(members)} tensors)"))
    return failures, explained


def _units(name: str, holds: str) -> Iterator[tuple[str, str]]:
    """Yield the layer and the expert of an atom with those whose values it has, if they differ."""
    one, two = name.split("."), holds.split(".")
    if len(one) != len(two):
        return
    odd = [i for i, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]
    if len(odd) == 1 and one[odd[0]].isdigit():
        yield ".".join(one[: odd[0] + 1]), ".".join(two[: odd[0] + 1])


def _target(unit: str, held: dict[str, str], causes: dict[str, Cause]) -> str | None:
    """Return the unit whose values all examined atoms of this one hold, if there are several."""
    members = [name for name in causes if name.startswith(unit + ".")]
    targets = set(held.values())
    whole = len(targets) == 1 and len(held) > 1 and len(held) == len(members)
    return next(iter(targets)) if whole else None
