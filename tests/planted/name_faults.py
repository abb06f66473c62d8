"""Faults of names: a tensor in another namespace than its kin, which engines drop or refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from tests.planted.edit import Tensors
from tests.planted.fault import STRUCTURE, Fault, in_bases
from tests.planted.header_faults import FOLDERS
from tests.planted.tensor_fault import tensor_fault

Respell = Callable[[str], str]
UNTIED = in_bases("wide-fp8-channel", "wide-mixed")


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, (hub, respell) in NAMES.items():
        plant = partial(_rename, hub=hub, respell=respell)
        where = UNTIED if hub == "lm_head.weight" else FOLDERS
        yield tensor_fault("names", name, plant, where, level=STRUCTURE)


def _rename(tensors: Tensors, hub: str, respell: Respell) -> str:
    """Give a tensor another name, and its scale with it."""
    stored, scale = tensors.stored(hub), tensors.scale(hub)
    home = tensors.home(stored)
    parts = (stored, *([scale.info.name] if scale else ()))
    names = {name: respell(name) for name in parts}
    home.entries = {
        names.get(name, name): entry.renamed(names.get(name, name))
        for name, entry in home.entries.items()
    }
    return names[stored]


def bare(name: str) -> str:
    """Take the namespace off."""
    return name.removeprefix("model.").removeprefix("language_model.")


def other(name: str) -> str:
    """Put a name of one namespace into the other."""
    return name.replace("model.language_model.", "model.") if "language" in name else inside(name)


def inside(name: str) -> str:
    """Put a name into the vision-language model's namespace."""
    return "model.language_model." + bare(name)


NAMES: dict[str, tuple[str, Respell]] = {
    "last-norm-in-the-other-namespace": ("norm.weight", other),
    "a-linear-in-the-other-namespace": ("{full}.self_attn.q_proj.weight", other),
    "a-norm-without-a-namespace": ("layers.1.input_layernorm.weight", bare),
    "a-wrapper-twice": ("embed_tokens.weight", lambda name: "model." + name),
    "mtp-inside-the-model": ("mtp.norm.weight", lambda name: "model." + name),
    "head-inside-the-model": ("lm_head.weight", lambda name: "model." + name),
    "in-a-holder-of-a-trainer": (
        "layers.0.linear_attn.A_log",
        lambda name: name.replace("A_log", "_fp32_params.A_log"),
    ),
}
