"""Dense products by warps with roles: what is compiled is read, a GPU says what it computes."""

from __future__ import annotations

import pytest
import torch

from runtime.kernels.encode.rows import quantize_rows
from runtime.kernels.linear.roles import roles_linear
from runtime.kernels.linear.roles_gated import roles_gated
from runtime.kernels.linear.weight import Fp8Weight
from tests.runtime.kernels.compiled import compiled_by
from tests.runtime.kernels.linear.stored import distance
from tests.runtime.kernels.test_roles import CHIP, COPIES, needs_gluon, needs_hopper


@pytest.fixture(scope="module")
def compiled():
    return compiled_by("linear.roles_compiled")


@pytest.mark.all  # seconds of compiling
@needs_gluon
def test_a_program_fits_a_multiprocessor_in_three_parts(compiled):
    for found in compiled.values():
        assert found["shared"] <= CHIP
        assert found["warps"] == 12


@pytest.mark.all
@needs_gluon
def test_a_stage_expects_what_is_copied_to_it(compiled):
    """Else a group waits for ever, or reads what has not come: 128 rows of x, and the weight's.

    Of FP8 the first rows of the weight are asked for before those of x are there.
    """
    for width, found in compiled.items():
        first = [] if width == "gated" else [int(width) * 128]  # bytes of a row
        whole = (128 + (256 if width == "gated" else int(width))) * 128
        assert found["expected"] == [whole] * (1 + len(first))
        assert found["copied"] == [*first, whole]


@pytest.mark.all
@needs_gluon
def test_a_stage_is_full_when_all_that_load_have_said_so(compiled):
    for width, found in compiled.items():
        assert found["arrivals"] == ([1, 2] if width == "gated" else [2, 1 + COPIES])
        assert found["unshared"] == []


@pytest.mark.all
@needs_gluon
def test_a_product_is_started_before_the_one_before_it_is_waited_for(compiled):
    """In FP8 the further rows are multiplied while the first sums are scaled."""
    both = 2  # groups of warps
    for width, found in compiled.items():
        assert found["dots"] == found["started"] == 2 * both
        assert found["left"] == both * ([1, 1, 0] if width == "gated" else [1, 0])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("width", [160, 192])
@pytest.mark.parametrize(
    ("m", "n", "k"), [(300, 640, 384), (17, 256, 128), (1000, 1280, 1024), (512, 5120, 17408)]
)
def test_products_by_roles_are_exact_to_what_tensor_cores_keep(m, n, k, width):
    """Beside float64, on the same codes, and the same twenty times: warps must not race.

    Tensor cores add 32 products at once, each cut to 2^-13 of the largest: at most 2^-8 of the sum
    of their sizes is lost, and as a rule far less. A bfloat16 has 8 bits: it loses 2^-8 at most.
    """
    generator = torch.Generator("cuda").manual_seed(m)
    x = torch.randn(m, k, device="cuda", generator=generator).bfloat16()
    codes = torch.randn(n, k, device="cuda", generator=generator).mul(100).clamp(-448, 448)
    scale = torch.rand(n // 128, k // 128, device="cuda", generator=generator) / (100 * k**0.5)
    weight = Fp8Weight(codes.to(torch.float8_e4m3fn), scale, dynamic=True)
    taken = quantize_rows(x, 128, 16)
    got = roles_linear(taken, weight, torch.bfloat16, width)
    x_MK = taken.codes[:m].double() * taken.scale[:m].double().repeat_interleave(128, 1)
    w_NK = scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    w_NK = w_NK * weight.codes.double()
    expected, sizes = x_MK @ w_NK.T, x_MK.abs() @ w_NK.abs().T
    assert ((got[:m] - expected).abs() <= (expected.abs() + sizes) * 2**-8).all()
    assert distance(got[:m], expected) < 2**-8
    for _ in range(20):
        assert torch.equal(roles_linear(taken, weight, torch.bfloat16, width)[:m], got[:m])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("m", "inner", "k"), [(300, 128, 256), (17, 640, 320), (515, 3584, 1024), (8192, 3584, 1024)]
)
def test_gate_and_up_by_roles_are_those_of_float64(m, inner, k):
    """Each of four steps rounds to bfloat16; the same twenty times: warps must not race."""
    generator = torch.Generator("cuda").manual_seed(m)
    x = torch.randn(m, k, device="cuda", generator=generator).bfloat16()
    w = torch.randn(2 * inner, k, device="cuda", generator=generator).div_(k**0.5).bfloat16()
    got = roles_gated(x, w)
    gate, up = (x.double() @ w.double().T).chunk(2, 1)
    assert distance(got, torch.nn.functional.silu(gate) * up) < 4 * 2**-8
    for _ in range(20):
        assert torch.equal(roles_gated(x, w), got)
