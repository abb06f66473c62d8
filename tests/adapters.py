"""Adapters for tests, named and shaped as PEFT 0.21 saves them, with seeded values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.checkpoints import Weights

PREFIX = "base_model.model."
CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": "acme/Borealis-4B",
    "peft_version": "0.21.2",
    "r": 4,
    "lora_alpha": 8,
    "bias": "none",
    "init_lora_weights": True,
    "fan_in_fan_out": False,
    "target_modules": ["q_proj"],
}


def noise(*shape: int, seed: int = 1, scale: float = 0.1) -> torch.Tensor:
    """Return seeded values in float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def lora(module: str, rows: int, columns: int, r: int = 4, seed: int = 1) -> Weights:
    """Return the factors of one linear layer."""
    return {
        f"{PREFIX}{module}.lora_A.weight": noise(r, columns, seed=seed),
        f"{PREFIX}{module}.lora_B.weight": noise(rows, r, seed=seed + 1),
    }


def of_matrix(module: str, weight: torch.Tensor, r: int = 4, seed: int = 1) -> Weights:
    """Return the factors of the linear layer that has this weight."""
    return lora(module, *weight.shape, r=r, seed=seed)


def write_adapter(folder: Path, tensors: Weights, **config: Any) -> Path:
    """Write an adapter; a field that is None is left out of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    said = {key: value for key, value in (CONFIG | config).items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    held = {name: value.contiguous() for name, value in tensors.items()}
    save_file(held, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def factors(tensors: Weights, module: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return B and A of a module."""
    names = (f"{PREFIX}{module}.lora_{side}.weight" for side in "BA")
    left, right = (tensors[name].float() for name in names)
    return left, right


def is_merged(
    merged: torch.Tensor,
    weight: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    scale: float,
) -> bool:
    """Whether rows are w + scale * (B @ A), added in float32 as peft does and then rounded.

    Both sums have lost up to (r + 2) 2^-24 of the sum of their terms' sizes. Where the middle
    between two numbers of the type lies in between, they are rounded to the two: one step apart,
    and as often as such an interval holds a middle.
    """
    sum_ = weight.float() + scale * (left @ right)
    expected = sum_.to(weight.dtype)
    sizes = weight.float().abs() + abs(scale) * (left.abs() @ right.abs())
    lost = (right.shape[0] + 2) * 2.0**-24 * sizes
    step = torch.finfo(weight.dtype).eps * torch.maximum(sum_.abs(), merged.float().abs())
    within = (merged.float() - expected.float()).abs() <= step + 2 * lost
    often = float((2 * lost / step.clamp(min=2.0**-40)).clamp(max=1.0).sum())
    return bool(within.all()) and int((merged != expected).sum()) <= 4 + 4 * often
