"""Messages lead to the fault: which rows, which expert, which layer, which factor, which source."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file

from formats.family.moves import Tile
from formats.gguf.file import GgufFile
from qwen35_convert import api
from qwen35_convert.recipe.recipe import build_recipe, read_recipe
from tests.checkpoints import dense, hub_config, make_weights, moe, write_checkpoint
from tests.qwen35_convert.verification.damage import damage, edit_config

NO_PROOF = api.RunOptions(verify=False)
QKV = "model.layers.0.linear_attn.in_proj_qkv.weight"


def failures(source, out, level="tensors"):
    report = api.verify(out, source, level=level)
    assert not report.passed
    return [f"{f.tensor} {f.problem}" for f in report.failures]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A square-MLP model and its BF16 artifact."""
    folder, config = tmp_path_factory.mktemp("plain"), hub_config(intermediate_size=128)
    source = write_checkpoint(folder / "in", config, make_weights(config))
    api.convert(source, folder / "out", read_recipe("bf16-split"), options=NO_PROOF)
    return source, folder / "out"


def damaged(plain, tmp_path, change):
    source, good = plain
    out = shutil.copytree(good, tmp_path / "out")
    damage(out, change)
    return failures(source, out)


def test_blocks_of_rows_that_moved_are_told(plain, tmp_path):
    def move(weights):
        weights[QKV] = weights[QKV].roll(128, 0)

    (said,) = damaged(plain, tmp_path, move)
    assert "rows in another order: rows 0..127 are the source's 384..511, " in said
    assert "128..511 are the source's 0..383" in said


def test_columns_that_moved_are_told(plain, tmp_path):
    def move(weights):
        name = "model.layers.2.mlp.up_proj.weight"
        weights[name] = weights[name].roll(32, 1)

    (said,) = damaged(plain, tmp_path, move)
    assert "columns in another order: columns 0..31 are the source's 96..127" in said


def test_shuffled_rows_are_told(plain, tmp_path):
    def shuffle(weights):
        order = torch.randperm(128, generator=torch.Generator().manual_seed(0))
        name = "model.layers.2.mlp.up_proj.weight"
        weights[name] = weights[name][order]

    (said,) = damaged(plain, tmp_path, shuffle)
    assert "rows in another order: 128 are moved, 0 is the source's" in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w * 1.03, "is the source times 1.03"),
        (lambda w: w * 0.5, "is the source times 0.5"),
        (lambda w: -w, "is the source with its sign flipped"),
        (lambda w: w.T, "holds the transpose of the source"),
        (lambda w: torch.cat([w[:5] * 0, w[5:]]), "5 of 128 rows are all zeros, the first is row"),
        (lambda w: torch.cat([w[:7], w[7:8] * 1.5, w[8:]]), "row 7 is farthest off, by 0.5"),
    ],
)
def test_a_changed_tensor_is_told(plain, tmp_path, change, said):
    name = "model.layers.2.mlp.up_proj.weight"
    (found,) = damaged(plain, tmp_path, lambda w: w.update({name: change(w[name])}))
    assert found.startswith(name)
    assert said in found


def test_layers_that_are_swapped_are_one_failure(plain, tmp_path):
    def swap(weights):
        one, two = "model.layers.0.", "model.layers.2."
        for name in [n for n in weights if n.startswith(one)]:
            other = two + name.removeprefix(one)
            weights[name], weights[other] = weights[other], weights[name]

    (said,) = damaged(plain, tmp_path, swap)
    assert said.startswith("layers.0 is swapped with layers.2 (2")


def test_a_layer_that_holds_another_s_values_is_one_failure(plain, tmp_path):
    def copy(weights):
        for name in [n for n in weights if n.startswith("model.layers.1.")]:
            weights[name] = weights[name.replace("layers.1.", "layers.0.", 1)].clone()

    (said,) = damaged(plain, tmp_path, copy)
    assert said.startswith("layers.1 holds the values of layers.0 (1")


def test_one_tensor_of_another_layer_is_named(plain, tmp_path):
    def copy(weights):
        name = "model.layers.{}.linear_attn.in_proj_z.weight"
        weights[name.format(1)] = weights[name.format(2)].clone()

    (said,) = damaged(plain, tmp_path, copy)
    assert "1.linear_attn.in_proj_z.weight holds the values of layers.2.linear_attn.in_pr" in said


def test_another_model_of_these_sizes_is_one_failure(plain, tmp_path):
    config = hub_config(intermediate_size=128)
    other = write_checkpoint(tmp_path / "in", config, make_weights(config, seed=36))
    changed, said = failures(other, plain[1])
    assert changed.startswith("SOURCE was changed after the conversion: model.safetensors")
    assert said.startswith("source ")
    assert "tensors differ from it: another model or revision?" in said


def test_a_revision_is_one_failure_that_says_how_far_off_it_is(plain, tmp_path):
    config = hub_config(intermediate_size=128)
    weights = make_weights(config)
    noise = torch.Generator().manual_seed(0)
    for name, w in weights.items():
        weights[name] = (w * (1 + 1e-3 * torch.randn(w.shape, generator=noise))).to(w.dtype)
    other = write_checkpoint(tmp_path / "in", config, weights)
    for recipe in ("bf16-split", "fp8-block"):
        api.convert(plain[0], tmp_path / recipe, read_recipe(recipe), options=NO_PROOF)
        changed, said = failures(other, tmp_path / recipe)
        assert changed.startswith("SOURCE was changed after the conversion: model.safetensors")
        assert "another model or revision?" in said
        assert "differs from the source by 0.00" in said or "0.02" in said


@pytest.mark.parametrize(
    ("make", "changes", "said"),
    [
        (moe, {}, "source the artifact is dense, the source has experts"),
        (
            dense,
            {"num_hidden_layers": 3, "layer_types": ["linear_attention"] * 2 + ["full_attention"]},
            "source the artifact has 4 layers, the source 3 (num_hidden_layers)",
        ),
        (
            dense,
            {"head_dim": 64, "vocab_size": 320},
            "source the artifact has vocab_size 256 (source: 320), head_dim 128 (source: 64), "
            "intermediate_size 128 (source: 384)",
        ),
    ],
)
def test_a_wrong_source_is_one_line(plain, tmp_path, make, changes, said):
    assert failures(make(tmp_path / "in", **changes), plain[1]) == [said]


def test_a_wrong_source_is_one_line_and_no_logits(plain, nano_path):
    (said,) = failures(nano_path, plain[1], "logits")
    assert said.startswith("source the artifact has vocab_size 256 (source: ")


@pytest.fixture(scope="module")
def experts(tmp_path_factory, nano_path):
    """A mixture of experts as a GGUF file, with its source."""
    from tests.qwen35_convert.containers.gguf.test_convert_gguf import made

    folder = tmp_path_factory.mktemp("experts")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
    source = made(folder / "in", nano_path, moe=True, **sizes, **heads)
    recipe = build_recipe(
        {"name": "q4", "quantize": {"scheme": "q4_k_m"}, "export": {"format": "gguf"}}
    )
    api.convert(source, folder / "m.gguf", recipe, options=NO_PROOF)
    return source, folder / "m.gguf"


def rewritten(path, tmp_path, name, change):
    """Copy a GGUF file with one tensor's bytes, [rows of a stack or matrix, bytes], changed."""
    out = tmp_path / path.name
    data = bytearray(path.read_bytes())
    file = GgufFile(path)
    start, stop = file.ranges[name]
    rows = torch.frombuffer(data[start:stop], dtype=torch.uint8).view(file.infos[name].shape[0], -1)
    data[start:stop] = change(rows).contiguous().numpy().tobytes()
    out.write_bytes(bytes(data))
    return out


def test_the_experts_of_a_stack_that_are_swapped_are_named(experts, tmp_path):
    source, path = experts
    name = "blk.1.ffn_up_exps.weight"
    out = rewritten(path, tmp_path, name, lambda e: e[[2, 1, 0, 3]])
    assert failures(source, out) == [
        f"{name} expert 0 holds the values of layers.1.mlp.experts.2.up_proj",
        f"{name} expert 2 holds the values of layers.1.mlp.experts.0.up_proj",
    ]


def test_one_damaged_expert_of_a_stack_is_named(experts, tmp_path):
    source, path = experts
    name = "blk.1.ffn_up_exps.weight"

    def spoil(rows):
        rows = rows.clone()
        rows[3, 70] ^= 1
        return rows

    (said,) = failures(source, rewritten(path, tmp_path, name, spoil))
    assert said.startswith(f"{name} expert 3 differs from the source")
    assert "codes that are not the nearest" in said


def test_heads_that_are_not_tiled_are_told(experts, tmp_path):
    source, path = experts
    name = "blk.0.attn_gate.weight"
    tiled = Tile(2, 3, 64)
    (said,) = failures(
        source, rewritten(path, tmp_path, name, lambda rows: rows[tiled.inverse().order()])
    )
    assert "value heads were not tiled, but are read as if they were" in said


def test_gguf_s_order_of_heads_in_a_folder_is_told(tmp_path):
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 64}
    source = dense(tmp_path / "in", **sizes)
    out = tmp_path / "out"
    api.convert(source, out, read_recipe("bf16-split"), options=NO_PROOF)
    name = "model.layers.0.linear_attn.in_proj_z.weight"
    order = Tile(2, 3, 64).order()
    damage(out, lambda w: w.update({name: w[name][order]}))
    (said,) = failures(source, out)
    assert "value heads are tiled, as GGUF has them" in said
    for other in ("A_log", "dt_bias", "in_proj_b.weight"):
        name = f"model.layers.1.linear_attn.{other}"
        tiled = load_file(out / "model.safetensors")[name][Tile(2, 3, 1).order()]
        damage(out, lambda w, n=name, v=tiled: w.update({n: v}))
        assert any(
            line.startswith(name) and "tiled, as GGUF has them" in line
            for line in failures(source, out)
        )


def test_a_config_that_computes_otherwise_is_named_before_the_tensors(plain, tmp_path):
    def lie(config):
        config["rms_norm_eps"] = 1e-5
        config["rope_parameters"] |= {"rope_theta": 10000, "mrope_section": [5, 5, 6]}

    source, good = plain
    out = shutil.copytree(good, tmp_path / "out")
    damage(out, lambda w: w[QKV].neg_())
    edit_config(out, lie)
    assert failures(source, out) == [
        "config.json rope_parameters.rope_theta is 10000.0, expected 10000000.0",
        "config.json rope_parameters.mrope_section[0] is 5, expected 6",
        "config.json rope_parameters.mrope_section[2] is 6, expected 5",
        "config.json rms_norm_eps is 1e-05, expected 1e-06",
        f"{QKV} is the source with its sign flipped",
    ]


def test_an_edited_config_is_named_by_its_fields_where_the_receipt_tells_the_recipe(
    plain, tmp_path
):
    source, good = plain
    out = shutil.copytree(good, tmp_path / "out")
    edit_config(out, lambda config: config["rope_parameters"].update(rope_theta=10000.0))
    said = "config.json rope_parameters.rope_theta is 10000.0, expected 10000000.0"
    assert failures(source, out, "structure") == [said]
