"""What a right encoder made of wrong values: another checkpoint, another precision, a fine-tune."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tests.fp8_weights import dequantize_channel, quantize_channel
from tests.planted.artifact import Base
from tests.planted.edit import Tensors, reading
from tests.planted.fault import FORGED, Fault, Names, in_bases
from tests.planted.order_faults import HOMES, hub_names
from tests.planted.tensor_fault import Change, Plant, tensor_fault

FP8 = in_bases("nano-fp8-block", "nano-fp8-block-hub", "wide-fp8-channel", "wide-mixed")
# Types whose encoders search: another search finds other codes, and only the receipt tells whose.
SEARCHED = in_bases("wide-q6_k", "wide-q5_k_m", "wide-q4_k_m", "wide-iq4_xs")
# By the scales of the FP8 checkpoint, the bases that round to its grid again. Rounding twice to
# one grid is rounding once: the codes are the nearest to the source's values, and as good as any.
THROUGH_FP8 = {
    "pow2": in_bases("nano-fp8-block", "nano-fp8-block-hub"),
    "float32": in_bases("wide-fp8-channel"),
}
FINER = in_bases("nano-bf16-split", "wide-bf16", "nano-q8_0", "moe-mxfp4_moe")


def exact(base: Base) -> bool:
    """Whether the codes follow from the values."""
    return FP8(base) or FINER(base)


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, how in (
        ("through-int4", through_int4),
        ("noise-of-5-per-cent", noisy(0.05)),
        ("three-per-cent-more", lambda v: 1.03 * v),
    ):
        yield tensor_fault("source", name, _from_source(how), HOMES)
    for mode, same in THROUGH_FP8.items():
        plant = _from_source(partial(through_fp8, mode=mode))
        name = f"through-fp8-of-{mode}-scales"
        yield tensor_fault(
            "source", name, plant, lambda base, same=same: HOMES(base) and not same(base)
        )
        yield tensor_fault("source", name, plant, same, receipts=(FORGED,))
    less, little = _from_source(lambda v: 0.99 * v), _from_source(noisy(0.001))
    yield tensor_fault("source", "one-per-cent-less", less, exact)
    yield tensor_fault("source", "one-per-cent-less-searched", less, SEARCHED, receipts=(FORGED,))
    yield tensor_fault("source", "noise-of-1-per-mille", little, exact)
    yield tensor_fault(
        "source", "noise-of-1-per-mille-searched", little, SEARCHED, receipts=(FORGED,)
    )
    yield tensor_fault("source", "a-fine-tune", partial(_fine_tune, ending=""), HOMES)
    linears = partial(_fine_tune, ending="_proj.weight")
    yield tensor_fault("source", "a-merged-adapter", linears, exact)
    yield tensor_fault("source", "a-merged-adapter-searched", linears, SEARCHED, receipts=(FORGED,))


def original(tensors: Tensors, hub: str) -> Tensor:
    """Return a tensor's values before they were quantised."""
    artifact = tensors.artifact
    exact = Base(artifact.base.model, "bf16" if artifact.base.gguf else "bf16-split")
    return reading(artifact.workshop.open(exact)).values(hub)


def _from_source(how: Change) -> Plant:
    """Return a fault of a whole encoder: the source's values, changed and encoded."""

    def plant(tensors: Tensors) -> str:
        name = "{last}up_proj.weight"
        return tensors.store(name, how(original(tensors, name)))

    return plant


def through_fp8(values: Tensor, mode: str) -> Tensor:
    """Round as an FP8 checkpoint did that was taken for the source."""
    return dequantize_channel(*quantize_channel(values, mode))


def through_int4(values: Tensor) -> Tensor:
    """Round to 15 levels a row."""
    step = values.abs().amax(-1, keepdim=True) / 7
    return (values / step).round() * step


def noisy(relative: float) -> Change:
    """Return a change by noise: another step of training."""

    def how(values: Tensor) -> Tensor:
        noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
        return values * (1 + relative * noise)

    return how


def _fine_tune(tensors: Tensors, ending: str) -> Names:
    """Change every weight of the layers a little; one at least is to be named."""
    names = [name for name in hub_names(tensors, "layers.") if name.endswith(ending)]
    changed = {tensors.store(name, noisy(0.001)(original(tensors, name))) for name in names}
    return "|".join(sorted(changed))
