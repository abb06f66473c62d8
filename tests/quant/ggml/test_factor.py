"""IQ2 and IQ3 whose importance nobody knows: a factor over all of a weight is named."""

from __future__ import annotations

import pytest
import torch

from quant.ggml import codec, kinds
from quant.ggml.judge import SIGNED
from quant.ggml_types import ggml_type

ROWS, COLUMNS = 24, 512


def weights(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(ROWS, COLUMNS, generator=generator) * 0.02).bfloat16().float()


def judged(name: str, w: torch.Tensor, blocks: torch.Tensor) -> list[str]:
    scheme = ggml_type(name)
    return scheme.judge(scheme.compare(w, {"blocks": blocks}, weighed=True))


def scaled(blocks: torch.Tensor, name: str, factor: float) -> torch.Tensor:
    """Return blocks whose float16 scales, which begin each, are multiplied."""
    blocks = blocks.clone()
    every = blocks.view(-1, kinds.block(name)[1])
    every[:, :2] = (every[:, :2].clone().view(torch.float16) * factor).view(torch.uint8)
    return blocks


@pytest.mark.parametrize("factor", [0.5, 1.5, 2.0])
@pytest.mark.parametrize("name", sorted(SIGNED))
def test_a_factor_is_named(name, factor):
    w = weights()
    blocks = codec.encode(name, w, importance=torch.linspace(1, 20, COLUMNS))
    assert judged(name, w, blocks) == []
    assert judged(name, w, scaled(blocks, name, factor))


@pytest.mark.parametrize("most", [5.0, 1e3, 1e5])
@pytest.mark.parametrize("name", sorted(SIGNED))
def test_another_importance_is_not(name, most):
    w, generator = weights(1), torch.Generator().manual_seed(2)
    importance = most ** torch.rand(COLUMNS, generator=generator)
    assert judged(name, w, codec.encode(name, w, importance=importance)) == []
