"""A fused tensor of 34 GB: experts are cut out of holes, beyond 2^32 elements and bytes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.sparse import A3B, Shape, write_sparse
from formats.family.slots import Form
from quant.opening import open_value
from qwen35_convert.containers.registry import open_checkpoint

F, H = 4096, 4096
EXPERTS = "model.language_model.layers.0.mlp.experts"


def write_expert(folder: Path, experts: int, chosen: int) -> dict[str, np.ndarray]:
    """Write a layer of holes with one expert in it; return its bits, the file read by hand."""
    sizes = A3B | {
        "hidden_size": H,
        "moe_intermediate_size": F,
        "num_experts": experts,
        "vocab_size": 1000,
        "num_hidden_layers": 1,
        "layer_types": ["linear_attention"],
        "mtp_num_hidden_layers": 0,
    }
    write_sparse(folder, Shape(sizes, form=Form(vision=False, mtp_layers=0, experts="fused")))
    bits, random = {}, np.random.default_rng(35)
    with (folder / "model-00001-of-00001.safetensors").open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        for name in ("gate_up_proj", "down_proj"):
            entry = header[f"{EXPERTS}.{name}"]
            rows, columns = entry["shape"][1:]
            bits[name] = random.integers(0x3C00, 0x4000, (rows, columns), "<u2")
            file.seek(8 + length + entry["data_offsets"][0] + chosen * rows * columns * 2)
            file.write(bits[name].tobytes())
    return {
        "gate_proj": bits["gate_up_proj"][:F],
        "up_proj": bits["gate_up_proj"][F:],
        "down_proj": bits["down_proj"],
    }


@pytest.mark.parametrize("chosen", [0, 127, 128, 511])  # 128 begins at 2^32 elements, 511 at 34 GB
def test_an_expert_is_cut_out_of_34_gb(tmp_path, chosen):
    bits = write_expert(tmp_path / "in", 512, chosen)
    source = open_checkpoint(tmp_path / "in")
    for name, expected in bits.items():
        value = open_value(source, source.layout.atoms[f"layers.0.mlp.experts.{chosen}.{name}"])
        assert np.array_equal(value.all().view(torch.uint16).numpy(), expected)
