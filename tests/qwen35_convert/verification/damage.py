"""Artifacts changed as a buggy tool would: their receipts go with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.checkpoints import Weights


def damage(out: Path, change: Callable[[Weights], None]) -> None:
    """Change the tensors."""
    weights = load_file(out / "model.safetensors")
    change(weights)
    save_file(
        {n: t.contiguous() for n, t in weights.items()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    total = sum(t.nbytes for t in weights.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict.fromkeys(weights, "model.safetensors"),
    }
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    (out / "qwen35-receipt.json").unlink(missing_ok=True)


def edit_config(out: Path, change: Callable[[dict], None]) -> None:
    """Change config.json."""
    config = json.loads((out / "config.json").read_text())
    change(config)
    (out / "config.json").write_text(json.dumps(config))
    (out / "qwen35-receipt.json").unlink(missing_ok=True)
