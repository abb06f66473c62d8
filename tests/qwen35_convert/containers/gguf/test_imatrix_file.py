"""`qwen35 imatrix` and `quantize.imatrix`: the file, what it does to blocks, what is refused."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import libgguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from formats.errors import FormatError
from formats.gguf.file import GgufFile, build_header
from formats.gguf.header import Kv
from formats.tensor import TensorInfo
from quant.opening import open_value
from qwen35_convert import api, measuring
from qwen35_convert.containers.gguf.imatrix_file import chunks_of, column_order
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.errors import OutputError, RecipeError
from qwen35_convert.recipe.recipe import build_recipe
from runtime.imatrix import collect
from tests.checkpoints import dense, hub_config, make_weights, write_checkpoint
from tests.gguf_reader import read_gguf

NANO = Path(__file__).parents[3] / "data" / "nano-dense"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    out = tmp_path_factory.mktemp("imatrix") / "imatrix.gguf"
    measuring.imatrix(NANO, out, chunks=2)
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
    stored = {t.name: np.array(t.data) for t in read_gguf(file).tensors}
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
    stored = {t.name: np.array(t.data) for t in read_gguf(file).tensors}
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


def copied(path, file, change):
    """Write an imatrix again, its tensors changed."""
    tensors = {t.name: np.array(t.data) for t in read_gguf(file).tensors}
    change(tensors)
    return gguf_of(path, tensors)


def gguf_of(path, tensors):
    infos = [TensorInfo(name, "F32", value.shape) for name, value in tensors.items()]
    header, offsets = build_header([Kv("general.type", "string", "imatrix")], infos)
    data = bytearray(header)
    for at, value in zip(offsets, tensors.values(), strict=True):
        data += bytes(at - len(data)) + value.astype(np.float32).tobytes()
    path.write_bytes(data + bytes(-len(data) % 32))
    return path


def made(out, imatrix):
    done = api.convert(NANO, out, recipe(imatrix))
    assert done.report.passed, done.report.failures
    return done.plan.notes, {t.name: np.array(t.data) for t in read_gguf(out).tensors}


NAME = "blk.0.ffn_up.weight"


def type_of(path):
    return next(t.tensor_type for t in read_gguf(path).tensors if t.name == NAME)


def weights():
    checkpoint = open_checkpoint(NANO)
    return open_value(checkpoint, checkpoint.layout.atoms["layers.0.mlp.up_proj"]).all()


def test_blocks_are_those_of_ggml_where_every_column_has_been_moved(file, tmp_path):
    """libgguf encodes as llama-quantize does; sums are positive in all columns of this tensor."""
    stored = {t.name: np.array(t.data) for t in read_gguf(file).tensors}
    importance = stored[NAME + ".in_sum2"][0] / stored[NAME + ".counts"][0]
    assert (importance > 0).all()
    _, tensors = made(tmp_path / "m.gguf", file)
    w, kind = weights().float().numpy(), type_of(tmp_path / "m.gguf")
    theirs = libgguf.quantize_rows(w, kind, imatrix=importance)
    assert np.array_equal(tensors[NAME], np.asarray(theirs).reshape(tensors[NAME].shape))


def test_a_tensor_whose_sums_are_all_zero_is_encoded_as_without_and_named(file, tmp_path):
    def erase(tensors):
        tensors[NAME + ".in_sum2"][:] = 0

    notes, tensors = made(tmp_path / "m.gguf", copied(tmp_path / "x.gguf", file, erase))
    plain = build_recipe({"quantize": {"scheme": "q4_0"}, "export": {"format": "gguf"}})
    api.convert(NANO, tmp_path / "plain.gguf", plain, options=api.RunOptions(verify=False))
    expected = {t.name: np.array(t.data) for t in read_gguf(tmp_path / "plain.gguf").tensors}
    assert np.array_equal(tensors[NAME], expected[NAME])
    said = "x.gguf: all sums of 1 experts or tensors are 0, which are encoded without it"
    assert f"{said}: {NAME}" in notes


def test_columns_whose_sums_are_zero_are_kept_and_counted(file, tmp_path):
    def erase(tensors):
        tensors[NAME + ".in_sum2"][:, 32:96] = 0

    notes, tensors = made(tmp_path / "m.gguf", copied(tmp_path / "x.gguf", file, erase))
    decoded = torch.from_numpy(dequantize(tensors[NAME], type_of(tmp_path / "m.gguf")))
    w = weights().float()
    error = (decoded - w)[:, 32:96].norm() / w[:, 32:96].norm()
    assert error < 0.12
    assert (
        "x.gguf: 64 columns of 1 tensors have sums of 0 and weigh 1/128 of the mean of the others: "
        + NAME
    ) in notes


def test_experts_that_no_token_reached_are_named(tmp_path):
    config = hub_config(moe=True, linear_value_head_dim=64, vocab_size=2048)
    source = write_checkpoint(tmp_path / "in", config, make_weights(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, source / name)
    shapes = {"blk.0.ffn_up_exps.weight": 128, "blk.3.ffn_down_exps.weight": 128}
    tensors = {}
    for name, columns in shapes.items():
        counts = np.array([[5.0], [0.0], [3.0], [1.0]])
        tensors |= {name + ".in_sum2": counts * np.ones(columns), name + ".counts": counts}
    tensors["blk.0.ffn_up_exps.weight.in_sum2"][3] = 0
    path = gguf_of(tmp_path / "x.gguf", tensors)
    notes = api.plan(source, recipe(path), out=tmp_path / "m.gguf").notes
    assert (
        "x.gguf: no token reached 2 experts or tensors, whose columns weigh alike: "
        "layers.0.mlp.experts.1, layers.3.mlp.experts.1"
    ) in notes
    assert (
        "x.gguf: all sums of 1 experts or tensors are 0, which are encoded without it: "
        "layers.0.mlp.experts.3"
    ) in notes


def test_an_imatrix_of_the_older_form_gives_the_same_blocks(file, tmp_path):
    stored = {t.name: np.array(t.data) for t in read_gguf(file).tensors}
    names = [name.removesuffix(".in_sum2") for name in stored if name.endswith(".in_sum2")]
    data = struct.pack("<i", len(names))
    for name in names:
        # 2^k calls, and sums that are means times the calls: to divide by them rounds nothing
        values = (stored[name + ".in_sum2"] / stored[name + ".counts"]).astype(np.float32) * 4
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 4, values.size)
        data += values.tobytes()
    path = tmp_path / "imatrix.dat"
    path.write_bytes(data + struct.pack("<ii", 2, 8) + b"wiki.txt")
    notes, tensors = made(tmp_path / "older.gguf", path)
    _, expected = made(tmp_path / "newer.gguf", file)
    assert all(np.array_equal(tensors[name], value) for name, value in expected.items())
    assert not [note for note in notes if "lacks" in note]
    kv = GgufFile(tmp_path / "older.gguf").kv
    assert kv["quantize.imatrix.dataset"].value == "wiki.txt"
    assert kv["quantize.imatrix.chunks_count"].value == 2
    assert kv["quantize.imatrix.entries_count"].value == len(names)
    assert api.verify(tmp_path / "older.gguf", NANO).passed


OTHER = {
    "another size": ("blk.0.ffn_up.weight", r"blk.0.ffn_up.weight: in_sum2 has shape \[1, 8\]"),
    "other names": ("model.layers.0.mlp.up_proj", "it has entries for model.layers.0.mlp.up_proj"),
}


@pytest.mark.parametrize(("name", "says"), OTHER.values(), ids=list(OTHER))
def test_an_imatrix_of_another_model_is_refused(tmp_path, name, says):
    path = gguf_of(
        tmp_path / "other.gguf",
        {name + ".in_sum2": np.ones((1, 8)), name + ".counts": np.ones((1, 1))},
    )
    with pytest.raises(FormatError, match=f"quantize.imatrix: other.gguf: {says}") as refused:
        api.plan(NANO, recipe(path), out=tmp_path / "m.gguf")
    assert refused.value.exit_code == 3
    assert "qwen35 imatrix SOURCE" in str(refused.value)


def test_what_is_no_imatrix_is_refused(tmp_path):
    with pytest.raises(FormatError, match=r"quantize.imatrix: .*missing.gguf cannot be read"):
        api.plan(NANO, recipe(tmp_path / "missing.gguf"), out=tmp_path / "m.gguf")
    (tmp_path / "text.gguf").write_text("not a GGUF file, but long enough for a header")
    with pytest.raises(FormatError, match=r"text.gguf is not an imatrix"):
        api.plan(NANO, recipe(tmp_path / "text.gguf"), out=tmp_path / "m.gguf")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose rows are whole super-blocks."""
    config = hub_config(
        hidden_size=256, intermediate_size=256, linear_value_head_dim=64, vocab_size=2048
    )
    source = write_checkpoint(tmp_path_factory.mktemp("wide"), config, make_weights(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, source / name)
    return source


def low(mix, imatrix=None, *rules):
    quantize = {"scheme": mix, "mix": "llama.cpp", "imatrix": imatrix and str(imatrix)}
    rows = [{"match": match, "scheme": scheme} for match, scheme in rules]
    return build_recipe({"quantize": quantize | {"rules": rows}, "export": {"format": "gguf"}})


@pytest.mark.parametrize("mix", ["iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs"])
def test_two_and_three_bits_without_an_imatrix_are_refused(wide, mix):
    with pytest.raises(RecipeError, match=r"quantize.imatrix is not given, and \d+ tensors") as no:
        api.plan(wide, low(mix), "m.gguf")
    assert no.value.exit_code == 2
    assert "qwen35 imatrix SOURCE" in str(no.value)


@pytest.mark.parametrize("mix", ["iq3_s", "iq3_m", "q2_k_s"])
def test_some_need_none(wide, mix):
    api.plan(wide, low(mix), "m.gguf")


def test_an_imatrix_that_lacks_what_has_two_bits_is_refused_by_name(wide, tmp_path):
    whole = tmp_path / "whole.gguf"
    measuring.imatrix(wide, whole, text=str(NANO / "merges.txt"), chunks=1)
    api.plan(wide, low("iq2_xs", whole), "m.gguf")

    def drop(tensors):
        for part in ("in_sum2", "counts"):
            del tensors[f"blk.1.ffn_up.weight.{part}"]

    part = copied(tmp_path / "part.gguf", whole, drop)
    with pytest.raises(RecipeError, match=r"part.gguf knows nothing of 1 tensors .* iq2_xs: "):
        api.plan(wide, low("iq2_xs", part), "m.gguf")
    api.plan(wide, low("iq2_xs", part, ("layers.1.mlp.up_proj", "q4_k")), "m.gguf")
    api.plan(wide, low("q4_k_m", part), "m.gguf")


def test_a_file_that_is_there_and_a_text_that_is_not_are_refused(file, tmp_path):
    before = file.read_bytes()
    with pytest.raises(OutputError, match="exists"):
        measuring.imatrix(NANO, file)
    with pytest.raises(RecipeError, match="cannot be read"):
        measuring.imatrix(NANO, tmp_path / "new.gguf", text=str(tmp_path / "none.txt"))
    assert file.read_bytes() == before
    assert not list(tmp_path.iterdir())


def test_the_source_itself_is_never_overwritten(tmp_path):
    plain = build_recipe({"quantize": {"scheme": "q8_0"}, "export": {"format": "gguf"}})
    model = tmp_path / "m.gguf"
    api.convert(NANO, model, plain, options=api.RunOptions(verify=False))
    before = model.read_bytes()
    with pytest.raises(OutputError, match="file of the source"):
        measuring.imatrix(model, model, overwrite=True)
    assert model.read_bytes() == before
