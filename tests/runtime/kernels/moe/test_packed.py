from __future__ import annotations

import pytest

from runtime.kernels.moe.layer import moe_experts_reference
from runtime.kernels.moe.packed import packed_tiles, packed_tokens, unpacked_pairs
from runtime.kernels.moe.packed_row import packed_routed_row
from runtime.kernels.moe.routing import route_absorbed_reference, route_reference
from runtime.kernels.moe.sum import summed
from tests.runtime.kernels.linear.test_packed import FLOAT32, FORMS, distance, normal, stored
from tests.runtime.models import needs_cuda

EXPERTS, CHOSEN = 5, 2


def experts(form, hidden, inner, device="cpu"):
    up, exact_up = stored(form, EXPERTS, 2 * inner, hidden, device=device)
    down, exact_down = stored(form, EXPERTS, hidden, inner, seed=1, device=device)
    return (up, down), (exact_up, exact_down)


@pytest.mark.parametrize("form", ["nvfp4", "32"])
def test_tokens_get_their_experts(form, interpreter):
    tokens = 2
    stacks, exact = experts(form, 64, 96)
    x, residual = normal(tokens, 64), normal(tokens, 64)
    chosen = route_reference(normal(tokens, EXPERTS), CHOSEN)
    expected = moe_experts_reference(x, *exact, *chosen)
    added = packed_tokens(x, *stacks, *chosen, residual)
    assert distance(added, residual + expected) < FLOAT32
    assert distance(summed(packed_tiles(x, *stacks, *chosen)), expected) < FLOAT32


@pytest.mark.parametrize(("form", "hidden", "inner"), [("nvfp4", 16, 272), ("32", 32, 288)])
def test_a_token_gets_its_experts_and_the_shared_one_in_two_kernels(
    form, hidden, inner, interpreter
):
    stacks, exact = experts(form, hidden, inner)
    x, residual, logits = normal(1, hidden), normal(1, hidden), normal(1, EXPERTS)
    chosen = route_absorbed_reference(logits, CHOSEN)
    expected = residual + moe_experts_reference(x, *exact, *chosen)
    assert distance(packed_routed_row(x, *stacks, logits, CHOSEN, residual), expected) < FLOAT32


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("hidden", "inner"), [(2048, 512), (1024, 384), (4096, 1024)])
def test_a_gpu_gives_a_token_its_experts_in_two_kernels(form, hidden, inner):
    stacks, exact = experts(form, hidden, inner, "cuda")
    x, residual = normal(1, hidden).bfloat16(), normal(1, hidden).bfloat16()
    logits = normal(1, EXPERTS).bfloat16()
    weights, chosen = route_absorbed_reference(logits.float(), CHOSEN)
    doubles = x.double(), *(e.double() for e in exact), weights.bfloat16().double(), chosen
    expected = residual.double() + moe_experts_reference(*doubles)
    got = packed_routed_row(x.cuda(), *stacks, logits.cuda(), CHOSEN, residual.cuda())
    assert distance(got.cpu(), expected) < 0.01


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
def test_a_gpu_gives_tokens_their_experts(form, tokens):
    stacks, exact = experts(form, 2048, 512, "cuda")
    x = normal(tokens, 2048).bfloat16()
    chosen = route_reference(normal(tokens, EXPERTS).bfloat16(), CHOSEN)
    doubles = x.double(), *(e.double() for e in exact), chosen[0].double(), chosen[1]
    expected = moe_experts_reference(*doubles)
    on_gpu = x.cuda(), *stacks, chosen[0].cuda(), chosen[1].cuda()
    assert distance(packed_tokens(*on_gpu).cpu(), expected) < 0.01
    for serve in (packed_tiles, unpacked_pairs):
        assert distance(summed(serve(*on_gpu)).cpu(), expected) < 0.01
