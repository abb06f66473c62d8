"""Faults of whole encoders of few bits: the source's values, changed and then rounded rightly."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from formats.family.layout import Atom
from quant.fourbit.parts import GLOBAL
from quant.scheme import Scheme
from quant.stored import scheme_of
from qwen35_convert.containers.registry import open_checkpoint
from tests.planted.edit import Tensors
from tests.planted.fault import REMOVED, Fault, in_bases
from tests.planted.fourbit_faults import ALL, GATE, UP, where
from tests.planted.right_fourbit import FORMS, encode
from tests.planted.source_faults import original, through_int4
from tests.planted.tensor_fault import Change, Plant, tensor_fault
from tests.planted.value_faults import SLIGHTLY, column_zeroed


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, (outputs, how) in ROUNDED.items():
        plant = _encoded(UP, UP, how)
        yield tensor_fault("four bits: values", name, plant, where(*outputs))
    for name, how in SLIGHTLY.items():
        yield tensor_fault("four bits: values", name, _encoded(UP, UP, how), where(*ALL))
    for name in ON_ONE_SIDE:
        plant = _all_encoded(SLIGHTLY[name])
        yield tensor_fault("four bits: values", f"everywhere-{name}", plant, where(*ALL))
    for name, (gain, bases) in BY_GPTQ.items():
        for base in bases:
            plant, home = _by_gptq(FORMS[base], gain), in_bases(base)
            yield tensor_fault("four bits: values", name, plant, home, receipts=(REMOVED,))
    plant = _encoded(UP, GATE, lambda values: values)
    yield tensor_fault("four bits: values", "of-the-gate", plant, where(*ALL))


def _encoded(hub: str, source: str, how: Change) -> Plant:
    """Return a fault that stores another weight's values, changed, in a tensor's own scheme."""

    def plant(tensors: Tensors) -> str:
        stored = tensors.stored(hub)
        opened = open_checkpoint(tensors.artifact.path)
        atom = next(a for a in opened.layout.atoms.values() if a.weight == stored)
        _encode(tensors, atom, how(original(tensors, source)))
        return stored

    return plant


def _all_encoded(how: Change) -> Plant:
    """Return a fault that stores the changed values of every weight of few bits."""

    def plant(tensors: Tensors) -> str:
        opened = open_checkpoint(tensors.artifact.path)
        for atom in opened.layout.atoms.values():
            if atom.quantized and not atom.scheme.startswith("fp8"):
                _encode(tensors, atom, how(original(tensors, f"{atom.name}.weight")))
        # of so many an example is enough
        return f"{tensors.stored(UP)}|source"

    return plant


def _by_gptq(scheme: Scheme, gain: float) -> Plant:
    """Return a fault that lets GPTQ choose the codes of every weight, multiplied before."""

    def plant(tensors: Tensors) -> str:
        encode(tensors, scheme, gain)
        return f"{tensors.stored(UP)}|source"

    return plant


def _encode(tensors: Tensors, atom: Atom, values: Tensor) -> None:
    """Store values in a weight's own scheme, under the scale that a whole tensor has."""
    scheme = scheme_of(atom)
    named = {part.key: part.info.name for part in scheme.parts(atom.weight, atom.shape)}
    shared = tensors.entry(named[GLOBAL]).view() if GLOBAL in named else None
    for key, value in scheme.encode(values, shared).items():
        view = tensors.entry(named[key]).view()
        view.copy_(value.view(view.dtype).reshape(view.shape))


def _weight_changed(values: Tensor) -> Tensor:
    """Change one of the usual ones by twice their deviation."""
    w = values[7, 11]
    values[7, 11] = w - 2 * values.std() * torch.where(w > 0, 1, -1)
    return values


# Before GPTQ: the gain, and where.
BY_GPTQ: dict[str, tuple[float, tuple[str, ...]]] = {
    "by-gptq-five-per-cent-more": (1.05, ("nano-int4-g32", "nano-nvfp4a16")),
    "by-gptq-five-per-cent-less": (0.95, ("nano-int4-g32",)),
}
# What leaves codes on one side of the nearest; noise is no more than AutoRound does.
ON_ONE_SIDE = ("a-per-cent-more", "three-per-cent-less", "shifted-by-a-twentieth")
ROUNDED: dict[str, tuple[tuple[str, ...], Change]] = {
    "a-column-zeroed": (ALL, column_zeroed),
    "a-weight-changed": (ALL, _weight_changed),
    "through-int4": (("int8",), through_int4),
}
