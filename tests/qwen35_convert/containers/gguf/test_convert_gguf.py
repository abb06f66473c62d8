"""`convert` to a GGUF file and back: what is written, what is refused, what verification sees."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from formats.errors import FormatError
from formats.gguf.file import GgufFile
from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.errors import OutputError, RecipeError
from qwen35_convert.recipe.recipe import build_recipe, read_recipe
from qwen35_convert.text.generation import Prompt
from qwen35_convert.verification.logits import LogitsCheck
from qwen35_convert.write.out import partial_of
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.formats.layouts import role_of, shiftable, to_gguf
from tests.gguf_reader import read_gguf

ROOT = Path(__file__).parents[4]
SIDES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "preprocessor_config.json",
)


@pytest.fixture(scope="module")
def nano():
    return ROOT / "tests" / "data" / "nano-dense"


def mix(scheme, **changes):
    quantize = {"scheme": scheme, "mix": "llama.cpp"} | changes.pop("quantize", {})
    export = {"format": "gguf"} | changes.pop("export", {})
    return build_recipe({"name": scheme, "quantize": quantize, "export": export, **changes})


def made(folder, nano, *, moe=False, clean=False, **changes):
    """Write a checkpoint with three value heads to a key head and the bundled tokenizer."""
    vocabulary = json.loads((nano / "config.json").read_text())["text_config"]["vocab_size"]
    config = hub_config(moe=moe, linear_value_head_dim=64, vocab_size=vocabulary, **changes)
    weights = make_weights(config)
    return written(folder, config, shiftable(weights) if clean else weights, nano)


def written(folder, config, weights, nano):
    """Write weights with the bundled model's side files, and its tokens' ids."""
    own = json.loads((nano / "config.json").read_text())
    ids = {field: own[field] for field in config if field in own and field.endswith("_token_id")}
    write_checkpoint(folder, config | ids, weights)
    for name in SIDES:
        shutil.copy(nano / name, folder / name)
    return folder


def tensors_of(path):
    return {t.name: np.array(t.data) for t in read_gguf(path).tensors}


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_an_f32_file_holds_what_llama_cpp_s_converter_would_write(tmp_path, nano, moe):
    source = made(tmp_path / "in", nano, moe=moe)
    done = api.convert(source, tmp_path / "m.gguf", mix("f32"))
    assert done.report is not None
    assert done.report.passed, done.report.failures
    config = json.loads((source / "config.json").read_text())["text_config"]
    wanted = to_gguf(load_file(source / "model.safetensors"), config)
    found = tensors_of(tmp_path / "m.gguf")
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert np.array_equal(found[name].view(np.uint32), value.numpy().view(np.uint32)), name


@pytest.mark.parametrize("scheme", ["bf16", "f16", "q8_0"])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_every_plain_mix_is_written_and_proven(tmp_path, nano, scheme, moe):
    source = made(tmp_path / "in", nano, moe=moe)
    done = api.convert(source, tmp_path / "m.gguf", mix(scheme))
    assert done.report.passed, done.report.failures
    infos = GgufFile(tmp_path / "m.gguf").infos
    assert {info.dtype for info in infos.values()} == {"F32", scheme.upper()}
    assert infos["blk.0.ssm_out.weight"].dtype == scheme.upper()
    assert infos["blk.0.ssm_conv1d.weight"].dtype == "F32"


def test_the_tokenizer_and_the_sampling_travel_along(tmp_path, nano):
    api.convert(nano, tmp_path / "m.gguf", mix("bf16"), options=api.RunOptions(verify=False))
    kv = GgufFile(tmp_path / "m.gguf").kv
    assert kv["tokenizer.ggml.pre"].value == "qwen35"
    assert len(kv["tokenizer.ggml.tokens"].value) == open_checkpoint(nano).config.sizes["V"]
    assert kv["general.sampling.top_k"].value == 20
    assert kv["general.name"].value == "Nano Dense"
    assert kv["qwen35.nextn_predict_layers"].value == 1
    assert kv["qwen35.attention.recurrent_layers"].value == [True] * 3 + [False] * 2


def test_a_file_generates_the_text_of_its_source(tmp_path, nano):
    api.convert(nano, tmp_path / "m.gguf", mix("f32"), options=api.RunOptions(verify=False))
    asked = Prompt("In the beginning", max_tokens=24)
    assert list(api.run_text(tmp_path / "m.gguf", asked)) == list(api.run_text(nano, asked))


def test_logits_of_a_file_are_those_of_its_source(tmp_path, nano, short_text):
    api.convert(nano, tmp_path / "m.gguf", mix("f32"), options=api.RunOptions(verify=False))
    check = LogitsCheck(short_text)
    report = api.verify(tmp_path / "m.gguf", nano, level="logits", logits=check)
    assert report.passed
    # only norms of layers that round 1 + w could differ, by an ulp of float32
    assert report.logits["kl_mean"] < 1e-12
    assert report.logits["top1"] == 1.0


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("scheme", ["f32", "bf16"])
def test_a_lossless_file_goes_back_to_the_same_bytes(tmp_path, nano, moe, scheme):
    """Norms are multiples of 2^-7, which 1 + w does not round; A_log may move by an ulp."""
    source = made(tmp_path / "in", nano, moe=moe, clean=True)
    api.convert(source, tmp_path / "m.gguf", mix(scheme), options=api.RunOptions(verify=False))
    api.convert(tmp_path / "m.gguf", tmp_path / "back", read_recipe("bf16-split"))
    api.convert(source, tmp_path / "direct", read_recipe("bf16-split"))
    back, direct = (load_file(tmp_path / f / "model.safetensors") for f in ("back", "direct"))
    assert set(back) == set(direct)
    for name, value in direct.items():
        assert back[name].dtype == value.dtype, name
        if name.endswith("A_log"):
            torch.testing.assert_close(back[name], value, rtol=2**-22, atol=2**-22)
        else:
            assert torch.equal(back[name], value), name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (
        config["architectures"]
        == json.loads((tmp_path / "direct" / "config.json").read_text())["architectures"]
    )


def test_a_quantised_file_goes_back_to_bf16_by_default(tmp_path, nano):
    api.convert(nano, tmp_path / "m.gguf", mix("q8_0"), options=api.RunOptions(verify=False))
    done = api.convert(tmp_path / "m.gguf", tmp_path / "back")
    assert done.plan.recipe.name == "bf16-split"
    assert done.report.passed, done.report.failures
    assert any("GGUF with Q8_0" in note for note in done.plan.notes)
    assert api.verify(tmp_path / "back").passed


def test_a_mix_is_called_by_the_type_of_most_of_its_weights(tmp_path, nano):
    out = tmp_path / "m.gguf"
    api.convert(nano, out, mix("q4_k_m"), options=api.RunOptions(verify=False))
    sizes = Counter()
    for name, info in GgufFile(out).infos.items():
        if info.dtype != "F32" and name != "token_embd.weight":
            sizes[info.dtype] += prod(info.shape)
    ((most, _),) = sizes.most_common(1)
    assert len(sizes) > 1
    assert open_checkpoint(out).layout.quantized == f"GGUF with {most}"


def test_a_gguf_source_can_be_quantised_to_fp8(tmp_path, nano):
    source = made(tmp_path / "in", nano)
    api.convert(source, tmp_path / "m.gguf", mix("bf16"), options=api.RunOptions(verify=False))
    done = api.convert(tmp_path / "m.gguf", tmp_path / "out", read_recipe("fp8-block"))
    assert done.report.passed, done.report.failures
    direct = api.convert(source, tmp_path / "direct", read_recipe("fp8-block"))
    assert done.report.schemes["fp8-block"] == direct.report.schemes["fp8-block"]


def test_an_fp8_source_is_dequantised_and_said_so(tmp_path, nano):
    source = made(tmp_path / "in", nano)
    api.convert(source, tmp_path / "fp8", read_recipe("fp8-block"))
    done = api.convert(tmp_path / "fp8", tmp_path / "m.gguf", mix("q8_0"))
    assert done.report.passed, done.report.failures
    assert any("two roundings" in note for note in done.plan.notes)


def test_mtp_is_kept_by_its_tensors_and_dropped_when_asked(tmp_path, nano):
    api.convert(nano, tmp_path / "with.gguf", mix("bf16"), options=api.RunOptions(verify=False))
    done = api.convert(nano, tmp_path / "without.gguf", mix("bf16", mtp="drop"))
    assert done.report.passed
    kept, dropped = (GgufFile(tmp_path / f"{n}.gguf") for n in ("with", "without"))
    assert set(kept.infos) - set(dropped.infos) == {n for n in kept.infos if n.startswith("blk.4.")}
    assert "qwen35.nextn_predict_layers" not in dropped.kv
    assert kept.kv["qwen35.block_count"].value == 5
    assert dropped.kv["qwen35.block_count"].value == 4


def test_a_checkpoint_without_mtp_tensors_has_none_whatever_its_config_says(tmp_path, nano):
    source = made(tmp_path / "in", nano)
    weights = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    trunk = {name: value for name, value in weights.items() if not name.startswith("mtp.")}
    written(tmp_path / "trunk", config, trunk, nano)
    done = api.convert(tmp_path / "trunk", tmp_path / "m.gguf", mix("bf16"))
    assert done.report.passed, done.report.failures
    assert GgufFile(tmp_path / "m.gguf").kv["qwen35.block_count"].value == 4


def test_vision_goes_to_a_file_beside_in_the_same_run(tmp_path, nano):
    done = api.convert(nano, tmp_path / "m.gguf", mix("bf16", vision="keep"))
    assert done.report.passed, done.report.failures
    kv = GgufFile(tmp_path / "mmproj-m.gguf").kv
    assert kv["clip.projector_type"].value == "qwen3vl_merger"
    found = tensors_of(tmp_path / "mmproj-m.gguf")
    weights = load_file(next(nano.glob("*.safetensors")))
    patch = weights["model.visual.patch_embed.proj.weight"].float().numpy()
    assert np.array_equal(found["v.patch_embd.weight.1"], patch[:, :, 1])
    listed = json.loads((tmp_path / "m.gguf.receipt.json").read_bytes())["output"]["files"]
    assert set(listed) == {"m.gguf", "mmproj-m.gguf"}


def test_a_damaged_vision_file_fails_verification(tmp_path, nano):
    api.convert(
        nano, tmp_path / "m.gguf", mix("bf16", vision="keep"), options=api.RunOptions(verify=False)
    )
    path = tmp_path / "mmproj-m.gguf"
    data = bytearray(path.read_bytes())
    data[GgufFile(path).ranges["v.blk.0.attn_qkv.weight"][0] + 1] ^= 0x40
    path.write_bytes(data)
    report = api.verify(tmp_path / "m.gguf", nano)
    assert {f.tensor for f in report.failures} == {"v.blk.0.attn_qkv.weight", "mmproj-m.gguf"}


def test_vision_that_is_not_there_cannot_be_kept(tmp_path, nano):
    api.convert(nano, tmp_path / "text", read_recipe("bf16-split"))
    with pytest.raises(FormatError, match="no vision tensors"):
        api.convert(tmp_path / "text", tmp_path / "m.gguf", mix("bf16", vision="keep"))


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_a_large_model_is_split_and_read_from_any_of_its_files(tmp_path, nano, moe):
    source = made(tmp_path / "in", nano, moe=moe)
    small = mix("q8_0", export={"max_shard_size": 200_000})
    done = api.convert(source, tmp_path / "m.gguf", small)
    assert done.report.passed, done.report.failures
    files = sorted(path.name for path in tmp_path.glob("m-*.gguf"))
    assert len(files) > 2
    assert files[0] == f"m-00001-of-{len(files):05d}.gguf"
    assert not (tmp_path / "m.gguf").exists()
    assert api.verify(tmp_path / files[1], source).passed
    whole = api.convert(source, tmp_path / "whole.gguf", mix("q8_0"))
    split = {n: d for name in files for n, d in tensors_of(tmp_path / name).items()}
    for name, data in tensors_of(tmp_path / "whole.gguf").items():
        assert np.array_equal(split[name], data)
    assert whole.report.schemes == done.report.schemes
    (tmp_path / files[2]).unlink()
    with pytest.raises(FormatError, match="is missing"):
        open_checkpoint(tmp_path / files[0])


def test_the_same_input_gives_the_same_bytes_whatever_the_workers(tmp_path, nano):
    source = made(tmp_path / "in", nano, moe=True)
    for workers in (1, 3):
        out = tmp_path / str(workers)
        out.mkdir()
        api.convert(
            source,
            out / "m.gguf",
            mix("q8_0", vision="keep"),
            options=api.RunOptions(workers=workers),
        )
    one, three = (sorted((tmp_path / n).iterdir()) for n in "13")
    assert [p.name for p in one] == [p.name for p in three]
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in three]


def test_a_name_and_a_recipe_must_agree_on_the_format(tmp_path, nano):
    with pytest.raises(RecipeError, match=r"expected a name that ends in \.gguf"):
        api.convert(nano, tmp_path / "out", mix("bf16"))
    with pytest.raises(RecipeError, match="expected a folder"):
        api.convert(nano, tmp_path / "m.gguf", read_recipe("fp8-block"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"quantize": {"scheme": "q4_k_xl"}}, "not known"),
        ({"quantize": {"scheme": "fp8-block"}}, "not known"),
        ({"quantize": {"rules": [{"match": "layers.9.*", "scheme": "q8_0"}]}}, "matches no weight"),
        ({"quantize": {"rules": [{"match": "*.A_log", "scheme": "q8_0"}]}}, "protected"),
        ({"quantize": {"rules": [{"match": "*.in_proj_a", "scheme": "q4_0"}]}}, "protected"),
        ({"quantize": {"rules": [{"match": "norm", "scheme": "bf16"}]}}, "protected"),
    ],
)
def test_what_a_recipe_may_not_ask_is_refused_before_a_byte(tmp_path, nano, values, said):
    with pytest.raises(RecipeError, match=said):
        api.convert(nano, tmp_path / "m.gguf", mix("q8_0", **values))
    assert not list(tmp_path.iterdir())


def test_ggml_s_types_are_no_schemes_of_a_folder(tmp_path, nano):
    with pytest.raises(RecipeError, match="not known"):
        api.convert(nano, tmp_path / "out", read_recipe("fp8-block", ("quantize.scheme=q8_0",)))
    assert not list(tmp_path.iterdir())


def test_a_rule_gives_a_type_to_what_it_names(tmp_path, nano):
    rules = [
        {"match": "layers.0.mlp.*", "scheme": "q4_0"},
        {"match": "*.in_proj_b", "scheme": "f16"},
    ]
    done = api.convert(nano, tmp_path / "m.gguf", mix("q8_0", quantize={"rules": rules}))
    assert done.report.passed, done.report.failures
    infos = GgufFile(tmp_path / "m.gguf").infos
    assert {infos[f"blk.0.ffn_{part}.weight"].dtype for part in ("gate", "up", "down")} == {"Q4_0"}
    assert infos["blk.1.ssm_beta.weight"].dtype == "F16"


def test_experts_of_a_stack_cannot_be_parted(tmp_path, nano):
    source = made(tmp_path / "in", nano, moe=True)
    rules = [{"match": "layers.0.mlp.experts.1.up_proj", "scheme": "q4_0"}]
    with pytest.raises(RecipeError, match="all experts in one type"):
        api.convert(source, tmp_path / "m.gguf", mix("q8_0", quantize={"rules": rules}))


def test_norms_that_were_shifted_already_are_refused(tmp_path, nano):
    """Renamed to the hub's layout, an MLX model would be shifted twice and load without a word."""
    source = made(tmp_path / "in", nano)
    weights = load_file(source / "model.safetensors")
    shifted = {n: v + 1 if role_of(n) == "norm" else v for n, v in weights.items()}
    written(source, json.loads((source / "config.json").read_text()), shifted, nano)
    for out, recipe in (("m.gguf", mix("bf16")), ("out", read_recipe("fp8-block"))):
        with pytest.raises(FormatError, match=r"norms hold 1 \+ w"):
            api.convert(source, tmp_path / out, recipe)


def test_one_honest_norm_near_one_is_no_reason_to_refuse(tmp_path, nano):
    source = made(tmp_path / "in", nano)
    weights = load_file(source / "model.safetensors")
    for name in ("model.language_model.norm.weight", "mtp.norm.weight"):
        weights[name] = weights[name] + 1
    written(source, json.loads((source / "config.json").read_text()), weights, nano)
    assert api.convert(source, tmp_path / "m.gguf", mix("bf16")).report.passed


def test_a_vocabulary_larger_than_the_embedding_is_refused(tmp_path, nano):
    source = made(tmp_path / "in", nano)
    config = hub_config(linear_value_head_dim=64, vocab_size=1000)
    written(source, config, make_weights(config), nano)
    with pytest.raises(FormatError, match="1000"):
        api.convert(source, tmp_path / "m.gguf", mix("bf16"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_value_heads_that_no_key_head_divides_are_refused(tmp_path, nano):
    source = made(tmp_path / "in", nano)
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["linear_num_key_heads"] = 2
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="expected a multiple of"):
        api.convert(source, tmp_path / "m.gguf", mix("bf16"))


@pytest.mark.parametrize(
    "tensor",
    ["blk.0.attn_qkv.weight", "blk.1.ssm_out.weight", "blk.3.attn_norm.weight", "blk.2.ssm_a"],
)
def test_a_changed_byte_is_found_with_and_without_a_receipt(tmp_path, nano, tensor):
    path = tmp_path / "m.gguf"
    api.convert(nano, path, mix("bf16"), options=api.RunOptions(verify=False))
    data = bytearray(path.read_bytes())
    data[GgufFile(path).ranges[tensor][0] + 1] ^= 0x40
    path.write_bytes(data)
    found = {failure.tensor for failure in api.verify(path, nano).failures}
    assert found == {tensor, "m.gguf"}
    (tmp_path / "m.gguf.receipt.json").unlink()
    assert {failure.tensor for failure in api.verify(path, nano).failures} == {tensor}


def test_untiled_heads_are_found_and_named(tmp_path, nano):
    """The bug of the first GGUF files of this family: heads grouped where they must be tiled."""
    source, path = made(tmp_path / "in", nano), tmp_path / "m.gguf"
    api.convert(source, path, mix("f32"), options=api.RunOptions(verify=False))
    data = bytearray(path.read_bytes())
    start, stop = GgufFile(path).ranges["blk.0.attn_gate.weight"]
    name = "model.language_model.layers.0.linear_attn.in_proj_z.weight"
    rows = load_file(source / "model.safetensors")[name].float()
    swapped = rows.view(3, 64, -1)[[0, 2, 1]].contiguous()
    data[start:stop] = swapped.numpy().tobytes()
    path.write_bytes(data)
    (tmp_path / "m.gguf.receipt.json").unlink()
    (failure,) = api.verify(path, source).failures
    assert failure.tensor == "blk.0.attn_gate.weight"
    assert "another order" in failure.problem


def test_a_file_of_the_user_s_is_kept(tmp_path, nano):
    out = tmp_path / "m.gguf"
    out.write_bytes(b"GGUF, but mine")
    with pytest.raises(OutputError, match="exists"):
        api.convert(nano, out, mix("bf16"))
    assert out.read_bytes() == b"GGUF, but mine"
    api.convert(nano, out, mix("bf16"), options=api.RunOptions(overwrite=True))
    assert api.verify(out, nano).passed
    with pytest.raises(OutputError, match="file of the source"):
        api.convert(out, out, mix("q8_0"), options=api.RunOptions(overwrite=True))


def test_an_interrupted_file_is_resumed_to_the_same_bytes(tmp_path, nano, monkeypatch):
    whole, out = tmp_path / "whole.gguf", tmp_path / "m.gguf"
    api.convert(nano, whole, mix("q8_0"), options=api.RunOptions(verify=False))
    written = 0
    from qwen35_convert.run import items as run_module

    original = run_module.convert_item

    def stop_after_a_few(*arguments):
        nonlocal written
        written += 1
        if written > 20:
            raise KeyboardInterrupt
        original(*arguments)

    monkeypatch.setattr(run_module, "convert_item", stop_after_a_few)
    with pytest.raises(KeyboardInterrupt):
        api.convert(nano, out, mix("q8_0"), options=api.RunOptions(verify=False, workers=1))
    assert not out.exists()
    assert (partial_of(out) / "journal").is_file()
    monkeypatch.setattr(run_module, "convert_item", original)
    api.convert(nano, out, mix("q8_0"), options=api.RunOptions(verify=False))
    assert out.read_bytes() == whole.read_bytes()
    assert not partial_of(out).exists()


def test_without_a_recipe_a_gguf_gets_q8_0(tmp_path, nano):
    plan = api.plan(nano, out=tmp_path / "m.gguf")
    assert plan.recipe.name == "gguf-q8_0"
    assert not list(tmp_path.iterdir())
