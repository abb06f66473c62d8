"""Fields that config.json has lost: all are one problem where their defaults do not fit.

The tensors say most of the sizes themselves, so that the message can.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from formats.family.config import Config
from formats.family.config_fields import ABSENT
from formats.family.names import PARTS, normalise, optional_part
from formats.stored import Problem
from formats.tensor import TensorInfo

LOST = "lost fields"
VISION = PARTS["visual"]
# symbol: the end of a name in every layer of its kind, and the axis that has this size
SHOWN_BY = {
    "NV": ("linear_attn.dt_bias", 0),
    "DV": ("linear_attn.norm.weight", 0),
    "K": ("linear_attn.conv1d.weight", -1),
    "HD": ("self_attn.q_norm.weight", 0),
}


def lost_fields(
    misfits: Iterable[Problem], config: Config, held: Mapping[str, TensorInfo]
) -> list[Problem]:
    """Return the problems, those of fields that are absent as one which names every field."""
    others: list[Problem] = []
    lost: dict[str, list[Problem]] = {"": [], VISION: []}
    for problem in misfits:
        of_vision = optional_part(normalise(problem.tensor)) == VISION
        group = lost[VISION if of_vision else ""] if problem.cause == LOST else others
        group.append(problem)
    for part, problems in lost.items():
        others += _told(problems, part, config, held)
    return others


def _told(
    lost: Sequence[Problem], part: str, config: Config, held: Mapping[str, TensorInfo]
) -> list[Problem]:
    """Return one problem; each, if the tensors show that the defaults are right."""
    text = "".join(problem.problem for problem in lost)
    absent = [symbol for symbol, f in config.fields.items() if f.endswith(ABSENT) and f in text]
    shown = _shown(absent, held)
    if all(shown.get(symbol) == config.sizes[symbol] for symbol in absent):
        return [replace(problem, cause="shape") for problem in lost]
    return [replace(_as_one(lost, absent, shown, config), part=part)]


def _as_one(
    lost: Sequence[Problem], absent: Sequence[str], shown: Mapping[str, int], config: Config
) -> Problem:
    fields = {symbol: config.fields[symbol].removesuffix(ABSENT) for symbol in absent}
    defaults = ", ".join(f"{field} {config.sizes[s]}" for s, field in fields.items())
    sizes = ", ".join(f"{fields[symbol]} {size}" for symbol, size in shown.items())
    return Problem(
        "config.json",
        f"lacks {', '.join(fields.values())}; {len(lost)} tensors do not fit the defaults "
        f"({defaults})\n  first {lost[0].tensor} {lost[0].problem.splitlines()[0]}",
        "take config.json from the model that it was made from"
        + (f"; the tensors show {sizes}" if sizes else ""),
    )


def _shown(symbols: Iterable[str], held: Mapping[str, TensorInfo]) -> dict[str, int]:
    """Return the sizes that a tensor's shape is."""
    sizes = {}
    for symbol in set(symbols) & SHOWN_BY.keys():
        end, axis = SHOWN_BY[symbol]
        info = next((i for name, i in held.items() if name.endswith("." + end)), None)
        if info and info.shape:
            sizes[symbol] = info.shape[axis]
    return {symbol: sizes[symbol] for symbol in SHOWN_BY if symbol in sizes}
