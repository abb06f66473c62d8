from __future__ import annotations

import pytest
import torch

from runtime.kernels.embed.tokens import embed_tokens, embed_tokens_reference
from tests.runtime.kernels.attention.test_rope import SCALED, scaling_of

# The angle is one product in both; a cosine is off by two units of 2^-24 at most in either.
FLOAT32 = 2**-22


@pytest.mark.parametrize(("tokens", "hidden", "rd"), [(1, 37, 6), (3, 2500, 64), (20, 1024, 30)])
@pytest.mark.parametrize("scaling", [None, "attention"])
def test_the_kernel_embeds_tokens_and_makes_the_angles_of_their_places(
    tokens, hidden, rd, scaling, interpreter
):
    """Also in several programs for one row, or for the angles."""
    draw = torch.Generator().manual_seed(0)
    ids, positions = (torch.randint(high, (tokens,), generator=draw) for high in (11, 5000))
    args = torch.randn(11, hidden, generator=draw), rd, 1e7
    scaled = None if scaling is None else scaling_of(SCALED[scaling])
    x, angles = embed_tokens(ids, positions, *args, scaled)
    wanted, expected = embed_tokens_reference(ids, positions, *args, scaled)
    assert torch.equal(x, wanted)
    for got, exact in zip(angles, expected, strict=True):
        assert (got - exact).abs().max() <= FLOAT32 * 2
