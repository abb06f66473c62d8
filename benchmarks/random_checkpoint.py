"""Write an artifact of a released model's size with random weights, for engines to be timed on.

    python -m benchmarks.random_checkpoint {0.8B,9B,27B,35B-A3B} OUT [--scheme keep|fp8-block]

The artifact is planned like any other, from a source of holes (`benchmarks.sparse`), in the names
of the hub; only what its items would write are pieces of one pool of Gaussian numbers instead, so
that it is there as fast as the disk takes it and no expert equals another. There is no MTP head, a
vision tower of one small layer, and no tokenizer.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import torch

from benchmarks.models import COMMON, NAMES, SIZES
from benchmarks.sparse import Shape, write_sparse
from formats.family.slots import Form
from qwen35_convert.containers.registry import expect, open_checkpoint
from qwen35_convert.recipe.recipe import read_recipe

if TYPE_CHECKING:
    from formats.tensor import TensorInfo
    from qwen35_convert.planning.plan import Plan, Shard

POOL = 1 << 26
PIECE = 1 << 24
AMPLITUDE = 100.0  # of FP8 codes
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
STANDARD = {"norm": 0.1, "gdn_norm": 0.1, "A_log": 1.0, "dt_bias": 0.1, "conv1d": 0.5}
VISION = {
    "depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2, "in_channels": 3,
    "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2,
    "num_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh",
    "deepstack_visual_indexes": [],
}  # fmt: skip
# Engines read images with it, and look for it even where they are given text only.
PREPROCESSOR = {
    "size": {"longest_edge": 1 << 24, "shortest_edge": 1 << 16}, "patch_size": 16,
    "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "processor_class": "Qwen3VLProcessor", "image_processor_type": "Qwen2VLImageProcessorFast",
}  # fmt: skip


def shape_of(name: str) -> Shape:
    """Return a released model's shape, without MTP head."""
    sizes, more = SIZES[name]
    text = {**COMMON, **dict(zip(NAMES, sizes, strict=True)), **more}
    text |= {"max_position_embeddings": 262144, "mtp_num_hidden_layers": 0}
    tied = bool(text.get("tie_word_embeddings"))
    form = Form(experts="fused", mtp_layers=0, vision=True, head=not tied)
    return Shape(text, form=form, vision=VISION)


def write_random(out: Path, name: str, scheme: str) -> Plan:
    """Write the artifact; return its plan."""
    settings = ["layout=hub", "vision=keep", "mtp=keep", f"quantize.scheme={scheme}"]
    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        source = Path(scratch) / name
        write_sparse(source, shape_of(name))
        plan = expect(open_checkpoint(source), read_recipe("fp8-block-hub", settings), out)
    out.mkdir()
    config = dict(plan.described)
    (out / "config.json").write_text(json.dumps(config))
    (out / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    roles = {o.name: item.atom.role for item in plan.items for o in item.outputs}
    pool = torch.randn(POOL, generator=torch.Generator().manual_seed(35)).bfloat16()
    pools = {torch.bfloat16: pool, torch.float32: pool.float()}
    pools[torch.float8_e4m3fn] = (
        (pool.float() * AMPLITUDE).clamp_(-448, 448).to(torch.float8_e4m3fn)
    )
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda shard: _write(out / shard.name, shard, roles, pools), plan.shards))
    return plan


def _write(
    path: Path, shard: Shard, roles: Mapping[str, str], pools: Mapping[torch.dtype, torch.Tensor]
) -> None:
    with path.open("wb") as file:
        file.write(shard.header)
        for info, offset in zip(shard.infos, shard.offsets, strict=True):
            file.seek(offset)
            for piece in _pieces(info, roles[info.name], pools):
                file.write(piece.view(torch.uint8).numpy().data)


def _pieces(
    info: TensorInfo, role: str, pools: Mapping[torch.dtype, torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield a tensor's numbers: codes as they are, others of the size that their role has."""
    dtype = DTYPES[info.dtype]
    pool, numel = pools[dtype], torch.Size(info.shape).numel()
    at = crc32(info.name.encode()) % (POOL - PIECE) // 16 * 16
    for start in range(0, numel, PIECE):
        piece = pool[at : at + min(PIECE, numel - start)]
        at = (at + PIECE // 3) % (POOL - PIECE) // 16 * 16
        yield piece if dtype == torch.float8_e4m3fn else _sized(piece, info, role)


def _sized(piece: torch.Tensor, info: TensorInfo, role: str) -> torch.Tensor:
    if info.name.endswith(("_scale_inv", "_scale")):
        return (piece.abs() * 0.2 + 0.9) / (AMPLITUDE * (128 * info.shape[-1]) ** 0.5)
    if role == "embed":
        return piece
    return piece * STANDARD.get(role, info.shape[-1] ** -0.5) + (role == "gdn_norm")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write what is asked for, and say how large it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("name", choices=SIZES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--scheme", default="keep")
    options = parser.parse_args(arguments)
    plan = write_random(options.out.resolve(), options.name, options.scheme)
    print(f"{options.out}: {plan.nbytes / 1e9:.2f} GB", file=sys.stderr)


if __name__ == "__main__":
    main()
