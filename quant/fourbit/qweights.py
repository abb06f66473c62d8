"""Finds weights in the layouts of GPTQ and AWQ, and says what is wrong with what looks like one.

The shapes of `qweight`, `qzeros` and `scales` show which layout it is, how many bits and which
groups. What the config says of the layout decides how zeros are read; of bits and groups it must
say the same, since engines go by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from formats.family.leftovers import FROM_ORIGINAL
from formats.family.packings import AWQ, GPTQ, GPTQ_V2, layout_of, promised
from formats.nearest import one_of
from formats.stored import Problem, StoredWeight
from quant.fourbit.integer import SCALE_TYPES
from quant.fourbit.parts import stored_parts
from quant.fourbit.qweight import (
    AWQ_4,
    G_IDX,
    GPTQ_4,
    GPTQ_8,
    QWEIGHT,
    QZEROS,
    SCALES,
    WEIGHT,
    Turned,
    fitted,
)
from quant.fourbit.words import WORD, in_a_word

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from formats.stored import Recogniser
    from formats.tensor import TensorInfo

BLOCK = "quantization_config"
FORMS: dict[tuple[str, int], Turned] = {
    (GPTQ, 4): GPTQ_4,
    (GPTQ, 8): GPTQ_8,
    (GPTQ_V2, 4): replace(GPTQ_4, less_one=False),
    (GPTQ_V2, 8): replace(GPTQ_8, less_one=False),
    (AWQ, 4): AWQ_4,
}
ALIKE = {GPTQ: (GPTQ, GPTQ_V2), AWQ: (AWQ,)}


@dataclass(frozen=True, slots=True)
class _Found:
    """The tensors that stand beside one `qweight`."""

    qweight: TensorInfo
    qzeros: TensorInfo
    scales: TensorInfo
    order: TensorInfo | None

    @property
    def layout(self) -> str:
        """GPTQ's has as many columns as there are steps."""
        return GPTQ if self.qweight.shape[1] == self.scales.shape[1] else AWQ

    @property
    def bits(self) -> int:
        """Return how many bits the zero points have; 0 if they are not a whole number of words."""
        rows = self.scales.shape[1]
        bits, rest = divmod(WORD * self.qzeros.shape[1], rows) if rows else (0, 0)
        return 0 if rest else bits

    @property
    def columns(self) -> int:
        """Return the columns of the weight, whose bits are known to fit words."""
        count = self.qweight.shape[0]
        return count * in_a_word(self.bits) if self.layout == GPTQ else count

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of the weight."""
        return self.scales.shape[1], self.columns


@dataclass(frozen=True, slots=True)
class Qweights:
    """Recognises them; `block` is config.json's quantization_config."""

    block: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def told(self, block: Mapping[str, Any]) -> Recogniser:
        """Return it with another block."""
        return replace(self, block=block)

    def recognise(self, infos: Mapping[str, TensorInfo]) -> Iterator[StoredWeight]:
        """Yield the weights whose tensors and config say the same."""
        for name in infos:
            parent, dot, last = name.rpartition(".")
            found = self._weight(parent + dot, infos) if last == QWEIGHT else None
            if isinstance(found, StoredWeight):
                yield found

    def explain(self, name: str, infos: Mapping[str, TensorInfo]) -> Problem | None:
        """Say what is wrong with a weight that was not recognised, by any of its tensors."""
        parent, dot, last = name.rpartition(".")
        if last not in (QWEIGHT, QZEROS, SCALES, G_IDX):
            return None
        found = self._weight(parent + dot, infos)
        return found if isinstance(found, Problem) else None

    def _weight(self, base: str, infos: Mapping[str, TensorInfo]) -> StoredWeight | Problem | None:
        """Return the weight, or what is wrong with it; None if it is nothing of the kind."""
        qweight, qzeros, scales = (infos.get(base + last) for last in (QWEIGHT, QZEROS, SCALES))
        if qweight is None:
            return None
        if qzeros is None or scales is None:
            missing = QZEROS if qzeros is None else SCALES
            return _wrong(qweight, f"has no {missing} beside it")
        parts = _Found(qweight, qzeros, scales, infos.get(base + G_IDX))
        why = _misshapen(parts) or self._untold(parts)
        if why:
            return _wrong(qweight, why)
        layout = layout_of(self.block) or parts.layout
        ordered = parts.order is not None and parts.layout == GPTQ
        form = fitted(FORMS[layout, parts.bits], parts.columns, scales, ordered=ordered)
        stored = stored_parts(form, base + WEIGHT, parts.shape, infos)
        why = self._broken(parts, form)
        if stored is None or why:
            shapes = ", ".join(f"{i.name.rpartition('.')[2]} {list(i.shape)}" for i in (
                qweight, qzeros, scales, *([parts.order] if parts.order else []),
            ))  # fmt: skip
            return _wrong(qweight, why or f"does not fit what stands beside it: {shapes}")
        return StoredWeight(base + WEIGHT, parts.shape, "BF16", form, stored)

    def _untold(self, parts: _Found) -> str | None:
        """Return what the config does not say of the layout, or says otherwise."""
        layout, method = layout_of(self.block), self.block.get("quant_method")
        if layout in ALIKE[parts.layout]:
            return None
        if method is None:
            return f"is laid out as {parts.layout}, but there is no {BLOCK} that says its format"
        return f"is laid out as {parts.layout}, but {BLOCK} says {layout or method}"

    def _broken(self, parts: _Found, form: Turned) -> str | None:
        """Return what the config promises and the tensors do not hold."""
        promise = promised(parts.qweight.name.removesuffix(f".{QWEIGHT}"), self.block)
        size, columns = promise.get("group_size"), parts.columns
        whole = columns if size in (-1, 0) else size
        held = form.size(columns)
        if promise.get("bits", form.bits) != form.bits:
            return f"has {form.bits} bits by its shape, but {BLOCK} says {promise['bits']}"
        if whole not in (None, held):
            return f"has groups of {held} columns by its shape, but {BLOCK} says {size}"
        if promise.get("desc_act") and not form.ordered and form.group != columns:
            return f"has no {G_IDX} beside it, but desc_act is true in {BLOCK}"
        return None


def _misshapen(parts: _Found) -> str | None:
    """Return why these tensors cannot be codes, zero points and steps, or None."""
    if any(len(info.shape) != 2 for info in (parts.qweight, parts.qzeros, parts.scales)):
        return "is not a matrix, or its scales or zeros are not"
    if parts.scales.dtype not in SCALE_TYPES:
        return f"has scales of type {parts.scales.dtype}, expected {', '.join(SCALE_TYPES)}"
    known = [bits for layout, bits in FORMS if layout == parts.layout]
    if parts.bits not in known:
        bits = f"{parts.bits} bits" if parts.bits in range(1, 9) else "not a whole number of bits"
        return f"has {bits} by the shape of its zeros, expected {one_of(known)}"
    groups = parts.scales.shape[0]
    if not groups or parts.columns % groups:
        return f"has {parts.columns} columns, which are not a whole number of {groups} groups"
    return None


def _wrong(qweight: TensorInfo, why: str) -> Problem:
    return Problem(qweight.name, why, FROM_ORIGINAL)


QWEIGHTS = Qweights()
