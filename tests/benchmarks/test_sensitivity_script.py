"""The rank correlation of predicted and measured KL, and the mixes it is taken of."""

from __future__ import annotations

import importlib
import random
import statistics

import pytest

FORMS = {"int4": 4.125, "nvfp4a16": 4.5, "fp8-block": 8.0, "fp8-channel": 8.0, "keep": 16.0}


@pytest.fixture
def script():
    return importlib.import_module("benchmarks.sensitivity")


def test_the_same_values_share_a_place(script):
    spearman = script.spearman
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 1, 2, 2], [5, 5, 9, 9]) == pytest.approx(1.0)
    assert spearman([1, 2, 3, 4], [1, 1, 1, 2]) == pytest.approx(3 / 15**0.5)


@pytest.mark.parametrize("bits", [4.2, 6.0, 8.0, 12.0])
def test_mixes_have_the_bits_that_were_drawn(script, bits):
    pick = random.Random(1)
    forms = [script.drawn(FORMS, pick, bits) for _ in range(4000)]
    assert statistics.mean(FORMS[form] for form in forms) == pytest.approx(bits, rel=0.03)


def test_what_no_form_reaches_gets_the_nearest(script):
    pick = random.Random(1)
    assert script.drawn(FORMS, pick, 2.0) == "int4"
    assert script.drawn(FORMS, pick, 20.0) == "keep"
    assert {script.drawn(FORMS, pick, None) for _ in range(99)} == FORMS.keys()
