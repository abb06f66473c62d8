"""Tensors over 4 GiB and 2^31 elements: sliced lazily, at offsets of 64 bits, in and out.

The files are sparse. Only the last expert has values, beyond element 2^31 of its stack; what is
made of it is compared with what numpy reads at that place.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.sparse import A3B, Shape, write_sparse
from formats.checkpoint import Checkpoint
from formats.gguf.file import GgufFile
from quant.ggml.scheme import BLOCKS
from qwen35_convert.containers.registry import expect, open_checkpoint
from qwen35_convert.planning.plan import Plan
from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.run.encoded import convert_item
from qwen35_convert.run.worker import Effort, Preparation, make_worker
from qwen35_convert.write.file_sink import FileSink
from qwen35_convert.write.sink import FolderSink

NANO = Path(__file__).parents[1] / "data" / "nano-dense"
E, F, C = 520, 1024, 2048  # gate_up [E, 2F, C] has 2.2e9 elements, 4.4e9 bytes
LAST = E - 1
GATE_UP = "model.language_model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.language_model.layers.0.mlp.experts.down_proj"
SHAPE = Shape(
    A3B
    | {
        "num_hidden_layers": 1,
        "num_experts": E,
        "vocab_size": 2048,
        "hidden_size": C,
        "moe_intermediate_size": F,
        "shared_expert_intermediate_size": F,
        "mtp_num_hidden_layers": 0,
    }
)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Checkpoint:
    """A layer whose last expert has values, all else is a hole."""
    folder = tmp_path_factory.mktemp("large") / "source"
    write_sparse(folder, SHAPE)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, folder)
    opened = open_checkpoint(folder)
    (file,) = opened.files.values()
    random = np.random.default_rng(0)
    with file.path.open("r+b") as written:
        for name in (GATE_UP, DOWN):
            start, stop = file.ranges[name]
            expert = (stop - start) // E
            values = random.standard_normal(expert // 2, np.float32)
            written.seek(start + LAST * expert)
            written.write((values.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    assert opened.infos()[GATE_UP].numel > 2**31
    assert opened.infos()[GATE_UP].nbytes > 2**32
    return opened


def expert_bits(source: Checkpoint, projection: str) -> np.ndarray:
    """Return the bits of the last expert's projection as numpy reads them from the file."""
    stored = DOWN if projection == "down_proj" else GATE_UP
    rows, columns = (C, F) if projection == "down_proj" else (F, C)
    info, file = source.infos()[stored], next(iter(source.files.values()))
    start = file.ranges[stored][0] + LAST * (info.nbytes // E)
    start += rows * columns * 2 if projection == "up_proj" else 0
    bits = np.fromfile(file.path, np.uint16, rows * columns, offset=start).reshape(rows, columns)
    assert np.count_nonzero(bits) > bits.size // 2
    return bits


def write_last(plan: Plan, source: Checkpoint, sink: FolderSink) -> dict[str, np.ndarray]:
    """Convert the rows of the last expert; return what stands at each output's place."""
    sink.open()
    sink.create()
    effort = Effort(1, "cpu", lambda _: None)
    worker, found = make_worker(plan, effort, Preparation(source)), {}
    for row in plan.items:
        if f".experts.{LAST}." in row.atom.name:
            convert_item(row, source, sink, worker)
            for output in row.outputs:
                shard = next(s for s in plan.shards if output.name in {i.name for i in s.infos})
                names = [info.name for info in shard.infos]
                at = shard.offsets[names.index(output.name)] + output.offset
                part = "" if output is row.outputs[0] else f"/{output.key}"
                key = f"{row.atom.name.rsplit('.', 1)[1]}{part}"
                found[key] = np.fromfile(sink.work / shard.name, np.uint8, output.nbytes, offset=at)
    sink.close()
    return found


@pytest.fixture(autouse=True)
def _sparse_output(monkeypatch):
    """Reserve nothing, so that a file of 8 GB takes no disk."""
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: None)


def test_an_expert_beyond_4_gib_is_cut_out_by_value(tmp_path, source):
    plan = expect(source, read_recipe("fp8-block"), Path("m"))
    found = write_last(plan, source, FolderSink(tmp_path / "out", plan.shards))
    for projection in ("gate_proj", "up_proj", "down_proj"):
        w = (expert_bits(source, projection).astype(np.uint32) << 16).view(np.float32)
        codes = torch.from_numpy(found[projection]).view(torch.float8_e4m3fn).float()
        scale = torch.from_numpy(found[f"{projection}/scale"]).view(torch.bfloat16).float()
        rows, columns = w.shape
        grid = scale.view(rows // 128, columns // 128)
        decoded = codes.view(rows, columns).numpy() * np.kron(grid.numpy(), np.ones((128, 128)))
        step = np.maximum(np.abs(w) * 2.0**-4, grid.numpy().max() * 2.0**-10)
        assert (np.abs(w - decoded) <= step * (1 + 1e-5)).all(), projection


def test_an_expert_is_put_beyond_4_gib_of_a_folder_and_of_a_gguf_file(tmp_path, source):
    fused = expect(source, read_recipe("bf16-split", ["experts=fused"]), Path("m"))
    outputs = [output for row in fused.items for output in row.outputs]
    assert max(output.offset for output in outputs) > 2**32
    found = write_last(fused, source, FolderSink(tmp_path / "out", fused.shards))
    for projection, data in found.items():
        assert (data.view(np.uint16) == expert_bits(source, projection).reshape(-1)).all()


@pytest.mark.parametrize("type_", ["bf16", "q8_0", "q4_k_m"])
def test_a_gguf_file_over_4_gib_is_written_and_read_at_its_end(tmp_path, source, type_):
    recipe = read_recipe(f"gguf-{type_}", ["export.max_shard_size=1TB"])
    plan = expect(source, recipe, Path("m.gguf"))
    found = write_last(plan, source, FileSink(tmp_path / "m.gguf", plan.shards))
    file = GgufFile(tmp_path / ".m.gguf.qwen35-partial" / "m.gguf")
    for projection, data in found.items():
        stack = file.read(f"blk.0.ffn_{projection.removesuffix('_proj')}_exps.weight")
        row = next(r for r in plan.items if r.atom.name.endswith(f".{LAST}.{projection}"))
        w = torch.from_numpy(expert_bits(source, projection)).view(torch.bfloat16)
        expected = row.scheme.encode(w)[BLOCKS]
        assert torch.equal(
            stack[LAST].reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
        )
        assert data.tobytes() == expected.contiguous().view(torch.uint8).numpy().tobytes()
    if type_ == "bf16":
        assert max(start for start, _ in file.ranges.values()) > 2**32
