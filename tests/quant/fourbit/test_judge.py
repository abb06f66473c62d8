"""Right encoders that weigh inputs pass, whatever the inputs; others' values and scales do not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch

from quant.choices import Choices
from quant.fourbit.hessian import Factor, factor
from quant.fourbit.int4 import INT4
from quant.fourbit.int8 import INT8
from quant.fourbit.mxfp4 import MXFP4
from quant.fourbit.nvfp4 import NVFP4
from quant.fourbit.parts import PACKED, SCALE, ZERO
from quant.stored import each_row

ASYMMETRIC = INT4.with_choices(Choices(group=32, symmetric=False))
FORMS = {"nvfp4": NVFP4, "mxfp4": MXFP4, "int4": INT4, "asymmetric": ASYMMETRIC, "int8": INT8}
forms = pytest.mark.parametrize("form", FORMS)
Rows = dict[str, torch.Tensor]
N, K = 64, 256


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixed(tokens: int) -> torch.Tensor:
    return draw(1, tokens, K) @ (torch.eye(K) + draw(2, K, K) / K**0.5)


def outliers() -> torch.Tensor:
    x = mixed(1024)
    x[:, [3, 70]] *= 300
    return x


INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "white": lambda: draw(1, 1024, K),
    "unequal": lambda: mixed(1024) * draw(3, K).exp(),
    "very unequal": lambda: mixed(1024) * (3 * draw(3, K)).exp(),
    "few tokens": lambda: mixed(16) * draw(3, K).exp(),
    "all alike": lambda: 3 + 0.1 * draw(1, 1024, K),
    "one direction": lambda: draw(1, 1024, 1) @ draw(4, 1, K) + 0.03 * draw(5, 1024, K),
    "outliers": outliers,
}


@cache
def known(inputs: str, damp: float | None) -> Factor:
    """Return the factor with our own damping, or a part of the diagonal's mean as others take."""
    x = INPUTS[inputs]()
    hessian = x.T @ x / len(x)
    if damp is None:
        return factor(hessian)
    diagonal = hessian.diagonal()
    return factor(hessian, damp=damp * float(diagonal.mean() / diagonal.median()))


@cache
def weight() -> torch.Tensor:
    spread = torch.exp(0.3 * draw(6, N, 1) + 0.2 * draw(7, 1, K))
    return (draw(8, N, K) * spread * 0.02).bfloat16()


@cache
def encoded(form: str, method: str, inputs: str, damp: float | None) -> Rows:
    scheme, w, stated = FORMS[form], weight(), known(inputs, damp)
    chosen = {"gptq": {"factor": stated}, "sweep": {"importance": stated.diagonal}, "nearest": {}}
    parts = scheme.encode(w, scheme.prepare(iter([w])), **chosen[method])
    return each_row(scheme, parts, (N, K))


def judged(form: str, rows: Rows) -> list[str]:
    return FORMS[form].judge(FORMS[form].compare(weight(), rows))


@forms
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("method", ["gptq", "sweep"])
def test_a_right_encoder_that_weighs_inputs_passes(form, inputs, method):
    assert judged(form, encoded(form, method, inputs, 0.01)) == []


@forms
@pytest.mark.parametrize("inputs", [name for name in INPUTS if name != "very unequal"])
def test_so_does_ours(form, inputs):
    assert judged(form, encoded(form, "gptq", inputs, None)) == []


@forms
@pytest.mark.parametrize("inputs", ["unequal", "very unequal", "few tokens"])
def test_so_it_does_with_hardly_any_damping(form, inputs):
    assert judged(form, encoded(form, "gptq", inputs, 0.001)) == []


def changed(rows: Rows, key: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
    part = rows[key].clone()
    whole = part.dtype in (torch.int8, torch.int32, torch.uint8)
    return rows | {key: how(part) if whole else how(part.float()).to(part.dtype)}


def swapped(part: torch.Tensor) -> torch.Tensor:
    part[[3, 4]] = part[[4, 3]]
    return part


def emptied(part: torch.Tensor) -> torch.Tensor:
    part[5] = 0
    return part


def nibbles(part: torch.Tensor) -> torch.Tensor:
    bytes_ = part.view(torch.uint8)
    return ((bytes_ >> 4) | (bytes_ << 4)).view(part.dtype)


def codes_of(rows: Rows) -> str:
    return PACKED if PACKED in rows else "codes"


CODES = {
    "words": lambda part: part.roll(1, 1),
    "rows": lambda part: part.roll(1, 0),
    "two rows": swapped,
}


weighed = pytest.mark.parametrize("inputs", ["unequal", "few tokens", "outliers"])


@forms
@weighed
@pytest.mark.parametrize("fault", CODES)
def test_codes_of_another_place_are_named(form, inputs, fault):
    rows = encoded(form, "gptq", inputs, 0.01)
    assert judged(form, changed(rows, codes_of(rows), CODES[fault]))


@forms
@weighed
def test_scales_of_other_rows_are_named(form, inputs):
    assert judged(
        form, changed(encoded(form, "gptq", inputs, 0.01), SCALE, lambda part: part.roll(1, 0))
    )


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "asymmetric"])
@weighed
def test_scales_of_other_groups_are_named(form, inputs):
    rows = encoded(form, "gptq", inputs, 0.01)
    assert judged(form, changed(rows, SCALE, lambda part: part.roll(1, 1)))


@pytest.mark.parametrize("form", ["nvfp4", "int4", "asymmetric", "int8"])
@weighed
@pytest.mark.parametrize("by", [0.5, 2.0])
def test_scales_by_a_factor_are_named(form, inputs, by):
    assert judged(form, changed(encoded(form, "gptq", inputs, 0.01), SCALE, lambda part: part * by))


@weighed
def test_zero_points_that_are_one_off_are_named(inputs):
    rows = encoded("asymmetric", "gptq", inputs, 0.01)
    assert judged("asymmetric", changed(rows, ZERO, lambda part: part + 1))


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "int4", "asymmetric"])
@weighed
def test_nibbles_in_the_wrong_order_are_named(form, inputs):
    assert judged(form, changed(encoded(form, "gptq", inputs, 0.01), PACKED, nibbles))


@forms
def test_a_bit_of_some_codes_is_named_where_codes_are_the_nearest(form):
    rows = encoded(form, "nearest", "white", 0.01)
    key = codes_of(rows)

    def flip(part: torch.Tensor) -> torch.Tensor:
        part = part.contiguous()
        part.view(torch.uint8).view(-1)[::8] ^= 4
        return part

    assert judged(form, rows) == []
    assert judged(form, changed(rows, key, flip))
    assert judged(form, changed(rows, key, emptied))


@forms
def test_a_column_of_zeros_is_named_where_codes_are_the_nearest(form):
    w = weight().clone()
    w[:, 9] = 0
    assert "whole column" in "".join(judged(form, nearest_to(form, w)))


@forms
def test_a_weight_that_was_changed_before_it_was_rounded_is_named(form):
    w = weight().clone()
    w[7, 11] += 0.06 * (1 if w[7, 11] < 0 else -1)
    assert "else the nearest" in "".join(judged(form, nearest_to(form, w)))


def test_eight_bits_of_weights_that_had_four_are_named():
    step = weight().float().abs().amax(1, keepdim=True) / 7
    w = ((weight() / step).round() * step).bfloat16()
    assert "every column" in "".join(judged("int8", nearest_to("int8", w)))


@pytest.mark.parametrize("form", ["nvfp4", "mxfp4", "int4", "int8"])
@weighed
def test_a_group_of_zeros_is_named(form, inputs):
    """It is one of the codes of a right encoder: nothing was moved to make up for it."""
    rows = encoded(form, "gptq", inputs, 0.01)
    key = codes_of(rows)

    def emptied_group(part: torch.Tensor) -> torch.Tensor:
        part = part.contiguous()
        zero = 0x88 if form == "int4" else 0
        part.view(torch.uint8)[3:9, 16 : 32 if form == "int8" else 24] = zero
        return part

    assert "all zeros" in "".join(judged(form, changed(rows, key, emptied_group)))


def nearest_to(form: str, w: torch.Tensor) -> Rows:
    scheme = FORMS[form]
    return each_row(scheme, scheme.encode(w, scheme.prepare(iter([w]))), (N, K))
