"""compressed-tensors' config_groups, held against the codes and scales that are stored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from formats.family.layout import Atom
from formats.side_names import CONFIG
from quant.fourbit.targets import group_of
from quant.stored import scheme_of
from qwen35_convert.containers.safetensors.quantization_table import (
    ARGS_ALIKE,
    ARGS_DEFAULTS,
    ARGS_RECORDS,
    DENSE,
    FORMATS_ALIKE,
    GROUP_FIELDS,
    GROUP_JUDGED,
    INPUT_STRATEGIES,
    MIXED,
    odd_rows,
)
from qwen35_convert.difference import same
from qwen35_convert.failure import Failure

# Of inputs whose groups get their scales as engines run, over one that is stored.
LOCAL = "local"
Groups = Mapping[str, Mapping[str, Any]]


def group_problems(
    block: Mapping[str, Any], quantized: Mapping[str, Atom], scaled: Collection[str]
) -> Iterator[Failure]:
    """Yield what is wrong with the block for these modules.

    scaled  the modules whose inputs have a stored scale
    """
    groups = block.get("config_groups")
    if not isinstance(groups, dict):
        yield Failure(CONFIG, "quantization_config: config_groups is missing")
        return
    misshapen = [f"config_groups {name}{problem}" for name, problem in _misshapen(groups)]
    for problem in misshapen or _of_the_whole(block, groups, quantized):
        yield Failure(CONFIG, f"quantization_config: {problem}")
    if not misshapen:
        yield from _of_modules(groups, quantized, scaled)


def static_modules(block: Mapping[str, Any], quantized: Iterable[str]) -> set[str]:
    """Return the modules whose group promises static scales of inputs."""
    groups = block.get("config_groups")
    if not isinstance(groups, dict) or any(True for _ in _misshapen(groups)):
        return set()
    named = ((module, group_of(module, groups)) for module in quantized)
    return {module for module, name in named if name and _static(groups[name])}


def _static(group: Mapping[str, Any]) -> bool:
    inputs = group.get("input_activations")
    return inputs is not None and inputs.get("dynamic", False) is False


def _misshapen(groups: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what engines cannot read, each with its group."""
    for name, group in groups.items():
        if not isinstance(group, dict):
            yield name, f" is {group!r:.120}, expected an object"
            continue
        targets = group.get("targets")
        if not isinstance(targets, list) or not all(isinstance(t, str) for t in targets):
            yield name, f": targets is {targets!r:.120}, expected a list of names"
        for part in ("weights", "input_activations"):
            if not isinstance(group.get(part), dict | None):
                yield name, f": {part} is {group[part]!r:.120}, expected an object"


def _of_modules(
    groups: Groups, quantized: Mapping[str, Atom], scaled: Collection[str]
) -> Iterator[Failure]:
    """Yield modules that no group targets, and what a group says of those that it does, once."""
    seen, reported = set(), set()
    for module, atom in quantized.items():
        name = group_of(module, groups)
        if name is None:
            yield Failure(module, f"is {atom.scheme}, but no group of config_groups targets it")
        elif (key := (name, atom.form, atom.shape[-1], module in scaled)) not in seen:
            seen.add(key)
            for problem in _odd_fields(groups[name], atom, static=module in scaled):
                if (name, problem) not in reported:
                    reported.add((name, problem))
                    yield Failure(CONFIG, f"config_groups {name}: {problem}, as {module}")


def _of_the_whole(
    block: Mapping[str, Any], groups: Groups, quantized: Mapping[str, Atom]
) -> Iterator[str]:
    """Judge the format of all groups, which holds where a group says none, and the zeros."""
    entries = [scheme_of(atom).config_entry([]) or {} for atom in quantized.values()]
    stored = dict.fromkeys(entry["format"] for entry in entries if entry.get("format"))
    right: list[str | None] = [alike for form in stored for alike in _alike(form)]
    if all(group.get("format") for group in groups.values()):
        right += [MIXED]
        right += [] if "format" in block else [None]
    got = block.get("format")
    if stored and got not in right:
        yield f"format is {got!r}, but {' and '.join(stored)} is stored"
    sparsity = block.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == DENSE):
        yield f"sparsity_config is {sparsity!r:.120}, but every weight is stored, expected null"


def _alike(form: str) -> tuple[str, ...]:
    return form, *FORMATS_ALIKE.get(form, ())


def _odd_fields(group: Mapping[str, Any], atom: Atom, *, static: bool) -> Iterator[str]:
    """Yield what a group says of weights or inputs that is not so.

    static  the scale of the inputs is stored
    """
    entry = scheme_of(atom).config_entry([])
    if entry is None:
        yield f"compressed-tensors has no {atom.scheme}, but it is stored"
        return
    yield from odd_rows(group, GROUP_FIELDS, GROUP_JUDGED)
    form, got = entry.get("format"), group.get("format")
    if form and got is not None and got not in _alike(form):
        yield f"format is {got!r}, but {form} is stored"
    weights = group.get("weights") or {}
    columns = atom.shape[-1]
    for field, value, right in _odd_args(weights, _of_weights(weights, entry["weights"], columns)):
        yield f"{field} of weights is {value!r}, but {right!r} is stored"
    inputs, expected = group.get("input_activations"), entry["input_activations"]
    # compressed-tensors takes an empty object for numbers with its defaults, vLLM for none
    if inputs is not None and not expected:
        yield f"input_activations is {inputs!r:.120}, expected null"
    elif inputs is None and expected and expected["dynamic"] == LOCAL:
        yield "input_activations is null, but scales of inputs are stored"
    elif inputs is not None:
        wanted = _of_inputs(inputs, expected, static=static)
        for field, value, right in _odd_args(inputs, wanted):
            yield f"{field} of input_activations is {value!r}, expected {right!r}"


def _of_weights(
    args: Mapping[str, Any], expected: Mapping[str, Any], columns: int
) -> Mapping[str, Any]:
    """Return what is expected of weights: one group of all columns is a channel."""
    whole = {"strategy": "group", "group_size": columns}
    if expected.get("strategy") == "channel" and whole.items() <= args.items():
        return {**expected, **whole}
    return expected


def _of_inputs(
    args: Mapping[str, Any], expected: Mapping[str, Any], *, static: bool
) -> dict[str, Any]:
    """Return what is expected of inputs, whose strategy may be left to the engine."""
    if static:
        return dict(expected) | {"dynamic": False, "strategy": "tensor"}
    strategy, wanted = args.get("strategy"), expected.get("strategy")
    left = strategy is None and expected.get("dynamic") != LOCAL
    if left or wanted is None or strategy in INPUT_STRATEGIES.get(wanted, ()):
        open_fields = {"strategy": strategy, "group_size": args.get("group_size")}
        return dict(expected) | open_fields
    return dict(expected)


def _odd_args(
    said: Mapping[str, Any], expected: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield field, value and expected value of what is not as expected."""
    for field in dict.fromkeys((*expected, *said)):
        got, right = (_value(args, field) for args in (said, expected))
        alike = (v for f, value, more in ARGS_ALIKE if (f, value) == (field, right) for v in more)
        if field not in ARGS_RECORDS and not any(same(got, value) for value in (right, *alike)):
            yield field, said.get(field), right


def _value(args: Mapping[str, Any], field: str) -> Any:
    default = ARGS_DEFAULTS.get(field)
    return default if field == "strategy" and args.get(field) is None else args.get(field, default)
