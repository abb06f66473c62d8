"""`qwen35 imatrix` and `quantize.imatrix`: the file, what it does to blocks, what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader

from formats.gguf.file import GgufFile, Kv, build_header
from formats.tensor import TensorInfo
from qwen35_convert import api
from qwen35_convert.containers.gguf.imatrix_file import chunks_of, column_order
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.errors import OutputError, RecipeError
from qwen35_convert.recipe import build_recipe
from runtime.imatrix import collect
from tests.checkpoints import dense

NANO = Path(__file__).parents[3] / "data" / "nano-dense"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    out = tmp_path_factory.mktemp("imatrix") / "imatrix.gguf"
    api.imatrix(NANO, out, chunks=2)
    return out


def recipe(imatrix):
    return build_recipe(
        {
            "quantize": {"scheme": "q4_0", "imatrix": str(imatrix)},
            "export": {"format": "gguf"},
        }
    )


def test_the_file_is_laid_out_as_llama_cpp_s(file):
    kv = GgufFile(file).kv
    assert kv["general.type"].value == "imatrix"
    assert kv["imatrix.chunk_count"].value == 2
    stored = {t.name: np.array(t.data) for t in GGUFReader(file).tensors}
    names = {name.removesuffix(".in_sum2") for name in stored if name.endswith(".in_sum2")}
    assert {name + ".counts" for name in names} == set(stored) - {n + ".in_sum2" for n in names}
    assert {
        "blk.0.ssm_out.weight",
        "blk.3.attn_q.weight",
        "token_embd.weight",
        "blk.4.nextn.eh_proj.weight",
    } <= names
    assert stored["blk.0.attn_qkv.weight.counts"].tolist() == [[1024.0]]


def test_columns_of_out_proj_are_tiled_as_its_weight_is(tmp_path):
    """Head g*r + j of three to a key head comes to place j*NK + g, and so do its sums."""
    checkpoint = open_checkpoint(dense(tmp_path / "in", sizes="ragged"))
    order = column_order(checkpoint, "layers.0.linear_attn.out_proj")
    heads = order.view(6, 24)[:, 0] // 24
    assert heads.tolist() == [0, 3, 1, 4, 2, 5]
    assert column_order(checkpoint, "layers.0.mlp.down_proj") is None


def test_sums_are_those_of_the_runtime(file):
    checkpoint = open_checkpoint(NANO)
    imatrix = collect(checkpoint, chunks_of(checkpoint, "default", 2))
    stored = {t.name: np.array(t.data) for t in GGUFReader(file).tensors}
    ours = imatrix.sums["layers.1.mlp.down_proj"].float().numpy()
    assert np.array_equal(stored["blk.1.ffn_down.weight.in_sum2"].reshape(-1), ours)


def test_an_imatrix_changes_blocks_and_the_file_says_so(file, tmp_path):
    plain = build_recipe({"quantize": {"scheme": "q4_0"}, "export": {"format": "gguf"}})
    api.convert(NANO, tmp_path / "plain.gguf", plain)
    done = api.convert(NANO, tmp_path / "m.gguf", recipe(file))
    assert done.report.passed, done.report.failures
    kv = GgufFile(tmp_path / "m.gguf").kv
    assert kv["quantize.imatrix.file"].value == "imatrix.gguf"
    assert kv["quantize.imatrix.chunks_count"].value == 2
    assert api.verify(tmp_path / "m.gguf", NANO).passed, "also without the imatrix"
    one, two = (GgufFile(tmp_path / name) for name in ("plain.gguf", "m.gguf"))
    name = "blk.0.ffn_up.weight"
    assert one.infos[name] == two.infos[name]
    assert not torch.equal(one.read(name), two.read(name))


def test_an_imatrix_of_another_model_is_refused(tmp_path):
    infos = [
        TensorInfo("blk.0.ffn_up.weight.in_sum2", "F32", (1, 8)),
        TensorInfo("blk.0.ffn_up.weight.counts", "F32", (1, 1)),
    ]
    header, offsets = build_header([Kv("general.type", "string", "imatrix")], infos)
    data = bytearray(header) + bytes(offsets[-1] + 32 - len(header))
    (tmp_path / "other.gguf").write_bytes(data)
    with pytest.raises(RecipeError, match="in_sum2 has shape"):
        api.plan(NANO, recipe(tmp_path / "other.gguf"), out=tmp_path / "m.gguf")


def test_what_is_no_imatrix_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="cannot be read"):
        api.plan(NANO, recipe(tmp_path / "missing.gguf"), out=tmp_path / "m.gguf")
    (tmp_path / "text.gguf").write_text("not a GGUF file, but long enough for a header")
    with pytest.raises(RecipeError, match="imatrix"):
        api.plan(NANO, recipe(tmp_path / "text.gguf"), out=tmp_path / "m.gguf")


def test_a_file_that_is_there_and_a_text_that_is_not_are_refused(file, tmp_path):
    before = file.read_bytes()
    with pytest.raises(OutputError, match="exists"):
        api.imatrix(NANO, file)
    with pytest.raises(RecipeError, match="cannot be read"):
        api.imatrix(NANO, tmp_path / "new.gguf", text=str(tmp_path / "none.txt"))
    assert file.read_bytes() == before
    assert not list(tmp_path.iterdir())


def test_the_source_itself_is_never_overwritten(tmp_path):
    plain = build_recipe({"quantize": {"scheme": "q8_0"}, "export": {"format": "gguf"}})
    model = tmp_path / "m.gguf"
    api.convert(NANO, model, plain, options=api.RunOptions(verify=False))
    before = model.read_bytes()
    with pytest.raises(OutputError, match="file of the source"):
        api.imatrix(model, model, overwrite=True)
    assert model.read_bytes() == before
