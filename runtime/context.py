"""The context of a forward pass, which is made once and goes to each layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from formats.family.config import Config
from formats.family.rope import Scaling
from runtime.kernels.attention.frequencies import attention_factor, frequencies
from runtime.kernels.attention.rope import rope_cos_sin
from runtime.state import Batch


@dataclass(frozen=True)
class Context:
    """What all layers of a forward pass share: the batch and its (cos, sin)."""

    config: Config
    batch: Batch
    angles: tuple[Tensor, Tensor]

    @staticmethod
    def of(
        config: Config,
        batch: Batch,
        dtype: torch.dtype,
        angles: tuple[Tensor, Tensor] | None = None,
    ) -> Context:
        """Return the context of a batch.

        angles  those of the batch, where they are known
        """
        return Context(config, batch, angles or angles_of(config, batch, dtype))


def angles_of(config: Config, batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) of the rows; text has one position for each token, so plain rope."""
    rotated, theta, scaling = rope_of(config)
    return rope_cos_sin(batch.positions, rotated, theta, None, dtype, scaling)


def rope_of(config: Config) -> tuple[int, float, Scaling | None]:
    """Return how many dimensions of a head are rotated, the base and the scaling."""
    rope = config.rope
    return int(config.sizes["HD"] * rope.partial), rope.theta, rope.scaling


def turns_of(config: Config, device: torch.device) -> tuple[Tensor, float]:
    """Return what the angles are made of: frequencies [r], and a factor of cosines and sines."""
    rotated, theta, scaling = rope_of(config)
    frequency_r, _ = frequencies(rotated, theta, None, device, scaling)
    return frequency_r, attention_factor(scaling)
