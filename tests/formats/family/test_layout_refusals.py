"""What is not the family is refused: by the tensor's name, with the field or the reason."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from formats.family.config import read_config
from formats.family.recognise import recognise
from formats.family.slots import Form
from formats.stored import by_cause, tell
from formats.tensor import TensorInfo
from quant.registry import RECOGNISERS
from tests.checkpoints import hub_config, make_weights, split_experts
from tests.formats.layouts import Config, P, Q, infos_of, recognised, to_fp8, to_mlx, without


def only_problem(config: Config, infos: dict[str, TensorInfo]) -> str:
    found = recognise(infos, read_config(config), RECOGNISERS)
    assert len(found.problems) == 1, [str(problem) for problem in found.problems]
    return f"{found.problems[0].tensor} {found.problems[0].problem}"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (Q, (256, 128), "shape [256, 128], expected [512, 128] (2*NH*HD, H)"),
        (Q, (128, 512), "it is transposed"),
        (Q, (512, 128, 1), "expected [512, 128]"),
        (P + "layers.0.linear_attn.in_proj_qkv.weight", (320, 128), "linear_num_key_heads 1"),
        (P + "layers.0.linear_attn.A_log", (1,), "linear_num_value_heads 3"),
        (P + "layers.0.linear_attn.conv1d.weight", (512, 4), "linear_conv_kernel_dim 4"),
        (P + "embed_tokens.weight", (250, 128), "text_config.vocab_size 256"),
        ("mtp.fc.weight", (256, 128), "it is transposed"),
        ("model.visual.blocks.0.attn.qkv.weight", (32, 96), "it is transposed"),
        ("model.visual.patch_embed.proj.weight", (32, 2, 4, 4, 3), "axes are in another order"),
        ("model.visual.pos_embed.weight", (17, 32), "vision_config.num_position_embeddings 16"),
    ],
)
def test_a_wrong_shape_is_refused_with_the_field_that_says_so(name, shape, message):
    config = hub_config()
    infos = infos_of(make_weights(config))
    infos[name] = replace(infos[name], shape=shape)
    found = only_problem(config, infos)
    assert found.startswith(name + " has shape ")
    assert "config.json: " in found
    assert message in found


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("gate_up_proj", (4, 128, 256), "axes are in another order"),
        ("gate_up_proj", (3, 256, 128), "text_config.num_experts 4"),
        ("gate_up_proj", (4, 128, 128), "moe_intermediate_size 128"),
        ("down_proj", (4, 128, 64), "moe_intermediate_size 128"),
    ],
)
@pytest.mark.parametrize("base", [P + "layers.1.mlp.experts.", "mtp.layers.0.mlp.experts."])
def test_wrong_experts_are_refused_with_the_field_that_says_so(base, name, shape, message):
    """Pruned experts (REAP) that config.json does not know of are one of these."""
    config = hub_config(moe=True)
    infos = infos_of(make_weights(config))
    infos[base + name] = replace(infos[base + name], shape=shape)
    assert message in only_problem(config, infos)


def test_a_pruned_trunk_with_a_whole_mtp_is_refused_naming_num_experts():
    """REAP: the config counts 4 experts, the MTP layer still has 7 of them, one by one."""
    config = hub_config(moe=True)
    whole = hub_config(moe=True, num_experts=7)
    trunk = without(make_weights(config), "mtp.")
    both = split_experts(trunk | {n: w for n, w in make_weights(whole).items() if n[:4] == "mtp."})
    problems = recognised(config, both).problems
    assert len(problems) == 1 + 3 * 3
    assert "num_experts 4" in problems[-1].problem
    assert all("num_experts is 4" in problem.problem for problem in problems[:-1])
    assert problems[0].tensor == "mtp.layers.0.mlp.experts.4.gate_proj.weight"


@pytest.mark.parametrize(
    "name",
    [
        Q,
        "lm_head.weight",
        "mtp.norm.weight",
        P + "norm.weight",
        P + "layers.0.mlp.up_proj.weight",
        "model.visual.merger.norm.bias",
    ],
)
def test_a_missing_tensor_is_refused_by_the_name_it_would_have(name):
    config = hub_config()
    infos = infos_of(make_weights(config))
    infos.pop(name)
    found = recognise(infos, read_config(config), RECOGNISERS)
    assert [problem.tensor for problem in found.problems] == [name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (P + "layers.4.input_layernorm.weight", "is in layer 4, but num_hidden_layers is 4"),
        (P + "layers.0.self_attn.q_proj.weight", "layer_types calls linear_attention"),
        (P + "layers.3.linear_attn.A_log", "layer_types calls full_attention"),
        (P + "layers.0.mlp.gate.weight", "in a dense model"),
        (P + "layers.0.mlp.experts.0.up_proj.weight", "in a dense model"),
        ("mtp.layers.0.linear_attn.A_log", "beside the other tensors"),
        ("model.visual.blocks.1.norm1.bias", "is in block 1, but vision_config.depth is 1"),
        (P + "layers.0.mlp.gate_proj.bias", "not a tensor of the Qwen3.5 family"),
        (P + "layers.#.input_layernorm.weight", "not a tensor of the Qwen3.5 family"),
        ("mtp.layers.#.input_layernorm.weight", "not a tensor of the Qwen3.5 family"),
        (P + "layers.00.input_layernorm.weight", "not a tensor of the Qwen3.5 family"),
        ("thinker." + Q, "not a tensor of the Qwen3.5 family"),
        ("", "not a tensor of the Qwen3.5 family"),
    ],
)
def test_a_tensor_without_a_place_is_refused_with_the_reason(name, message):
    config = hub_config()
    infos = infos_of(make_weights(config))
    infos[name] = TensorInfo(name, "BF16", (128,))
    assert message in only_problem(config, infos)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (P + "layers.1.mlp.experts.0.up_proj.weight", "beside the other tensors"),
        (P + "layers.1.mlp.experts.4.up_proj.weight", "4, but text_config.num_experts is 4"),
        (P + "layers.1.mlp.up_proj.weight", "in a mixture of experts"),
    ],
)
def test_an_expert_too_many_is_refused(name, message):
    config = hub_config(moe=True)
    infos = infos_of(make_weights(config))
    infos[name] = TensorInfo(name, "BF16", (128, 128))
    assert message in only_problem(config, infos)


def test_mtp_layers_are_counted_and_not_believed():
    """An index of a billion must not make a billion places."""
    config = hub_config()
    infos = infos_of(make_weights(config))
    name = "mtp.layers.999999999.input_layernorm.weight"
    infos[name] = TensorInfo(name, "BF16", (128,))
    found = recognise(infos, read_config(config), RECOGNISERS)
    assert name in [problem.tensor for problem in found.problems]
    assert len(found.problems) == 12  # the second layer's 11 tensors, and this one


@pytest.mark.parametrize("shape", [(0,), (0, 128), (512, 0)])
def test_an_empty_tensor_is_refused_by_name(shape):
    config = hub_config()
    infos = infos_of(make_weights(config))
    infos[Q] = replace(infos[Q], shape=shape)
    assert f"{Q} is empty" in only_problem(config, infos)


@pytest.mark.parametrize("dtype", ["F64", "BOOL", "I64", "F8_E8M0"])
def test_a_dtype_that_is_no_weight_is_refused(dtype):
    config = hub_config()
    infos = infos_of(make_weights(config))
    infos[Q] = replace(infos[Q], dtype=dtype)
    assert f"{Q} has dtype {dtype}, expected BF16, F16, F32" in only_problem(config, infos)


def test_packed_leftovers_are_named_beside_what_they_leave_missing():
    config = hub_config()
    infos = infos_of(make_weights(config))
    infos[Q] = TensorInfo(Q, "U8", (32768, 1))
    problems = recognise(infos, read_config(config), RECOGNISERS).problems
    assert [p.problem for p in problems] == ["is packed U8 with shape [32768, 1]", "is missing"]


def test_a_wrapper_that_nobody_knows_is_one_problem():
    config = hub_config()
    infos = infos_of({f"ema.{name}": w for name, w in make_weights(config).items()})
    assert f"as {len(infos)} tensors do" in only_problem(config, infos)


def test_a_prefix_beside_the_model_is_told_once_with_a_count():
    config = hub_config()
    weights = make_weights(config)
    both = weights | {f"critic.{name}": w for name, w in weights.items()}
    causes = by_cause(recognised(config, both).problems)
    assert {problems[0].problem for problems in causes} == {"is not a tensor of the Qwen3.5 family"}
    assert sum(map(len, causes)) == len(weights)
    assert f"  and   {len(causes[0]) - 1} more: critic." in tell(causes[0])


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("mtp.norm.weight", "mtp"),
        ("mtp.layers.0.mlp.up_proj.weight", "mtp"),
        ("model.visual.merger.norm.bias", "vision"),
        (P + "norm.weight", ""),
        (Q, ""),
    ],
)
@pytest.mark.parametrize("harm", ["missing", "misshapen", "packed"])
def test_a_problem_knows_which_part_of_the_model_it_goes_with(name, part, harm):
    config = hub_config()
    infos = infos_of(make_weights(config))
    info = infos.pop(name)
    if harm == "misshapen":
        infos[name] = replace(info, shape=(7, 7))
    if harm == "packed":
        infos[name] = replace(info, dtype="U8")
    layout = recognise(infos, read_config(config), RECOGNISERS)
    assert {problem.part for problem in layout.problems} == {part}
    assert layout.problems_without({"vision", "mtp"}) == ([] if part else layout.problems)


LINEAR = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")


def test_a_config_that_lost_fields_is_one_problem_that_names_each():
    config = hub_config()
    infos = infos_of(make_weights(config))
    for field in LINEAR:
        del config["text_config"][f"linear_{field}"]
    found = recognise(infos, read_config(config), RECOGNISERS).problems
    assert [problem.tensor for problem in found] == ["config.json"]
    assert all(f"text_config.linear_{field}" in found[0].problem for field in LINEAR)
    assert "linear_num_value_heads 3" in found[0].remedy
    assert "linear_value_head_dim 128" in found[0].remedy


def test_lost_fields_of_the_vision_tower_are_a_problem_of_it_alone():
    config = hub_config()
    infos = infos_of(make_weights(config))
    del config["vision_config"]["patch_size"], config["text_config"]["linear_key_head_dim"]
    found = recognise(infos, read_config(config), RECOGNISERS).problems
    assert [problem.part for problem in found] == ["", "vision"]
    assert "lacks text_config.linear_key_head_dim;" in found[0].problem
    assert "lacks vision_config.patch_size;" in found[1].problem


def test_a_lost_field_whose_default_fits_is_not_to_blame():
    config = hub_config(head_dim=256)
    infos = infos_of(make_weights(config))
    config["text_config"] |= {"num_attention_heads": 4}
    del config["text_config"]["head_dim"]
    found = recognise(infos, read_config(config), RECOGNISERS).problems
    assert [problem.tensor for problem in found][:1] == [Q]
    assert "head_dim (absent, default) 256" in found[0].problem


def test_lost_layer_types_are_told_once_and_nothing_is_missing():
    config = hub_config(layer_types=["linear_attention", "full_attention"] * 2)
    infos = infos_of(make_weights(config))
    del config["text_config"]["layer_types"]
    found = recognise(infos, read_config(config), RECOGNISERS).problems
    assert len(by_cause(found)) == 1
    assert "full_attention_interval 4 (absent, default; layer_types too)" in found[0].problem


def fp8_infos(config: Config) -> dict[str, TensorInfo]:
    return infos_of(to_fp8(make_weights(config)))


def test_fp8_without_a_scale_is_refused():
    infos = fp8_infos(hub_config())
    infos.pop(Q + "_scale_inv")
    assert only_problem(hub_config(), infos).startswith(f"{Q} is FP8 without a scale")


def test_a_scale_of_a_bf16_weight_is_refused():
    infos = fp8_infos(hub_config())
    infos[Q] = replace(infos[Q], dtype="BF16")
    assert f"{Q}_scale_inv scales {Q}, which is BF16" in only_problem(hub_config(), infos)


def test_a_scale_without_its_weight_is_refused():
    infos = fp8_infos(hub_config())
    infos.pop(Q)
    problems = recognise(infos, read_config(hub_config()), RECOGNISERS).problems
    assert [(p.tensor, p.problem) for p in problems] == [
        (Q, "is missing"),
        (Q + "_scale_inv", "scales a weight that does not exist"),
    ]


@pytest.mark.parametrize("shape", [(1, 4), (4, 2), (8, 1), (4,), (2,), (4, 1, 1)])
def test_a_scale_of_another_grid_is_refused_with_all_grids(shape):
    infos = fp8_infos(hub_config())
    infos[Q + "_scale_inv"] = replace(infos[Q + "_scale_inv"], shape=shape)
    found = only_problem(hub_config(), infos)
    assert found.startswith(f"{Q}_scale_inv has shape {list(shape)}, expected [4, 1] (fp8-block)")


@pytest.mark.parametrize("dtype", ["U8", "I32", "F8_E4M3", "F64"])
def test_a_scale_of_an_odd_type_is_refused(dtype):
    """A packed E8M0 scale in I32 read as a number is a wrong scale."""
    infos = fp8_infos(hub_config())
    infos[Q + "_scale_inv"] = replace(infos[Q + "_scale_inv"], dtype=dtype)
    assert f"_scale_inv has dtype {dtype}" in only_problem(hub_config(), infos)


def test_two_scales_of_one_weight_are_refused():
    infos = fp8_infos(hub_config())
    infos[Q + "_scale"] = TensorInfo(Q + "_scale", "F32", ())
    assert f"{Q}_scale is not a tensor" in only_problem(hub_config(), infos)


@pytest.mark.parametrize(
    "name",
    [
        P + "norm.weight",
        P + "layers.0.linear_attn.dt_bias",
        P + "layers.0.linear_attn.conv1d.weight",
        "model.visual.patch_embed.proj.weight",
    ],
)
@pytest.mark.parametrize("scaled", [False, True])
def test_fp8_that_is_no_matrix_is_refused(name, scaled):
    infos = infos_of(make_weights(hub_config()))
    infos[name] = replace(infos[name], dtype="F8_E4M3")
    if scaled:
        infos[name + "_scale"] = TensorInfo(name + "_scale", "F32", (1,))
    reason = r"is (FP8|fp8-tensor) with shape \[|is FP8 without a scale"
    assert re.search(f"{re.escape(name)} ({reason})", only_problem(hub_config(), infos))


def test_vision_without_a_vision_config_is_refused():
    config = hub_config()
    weights = make_weights(config)
    config["vision_config"] = None
    found = recognised(config, weights)
    visual = [name for name in weights if name.startswith("model.visual.")]
    assert [problem.tensor for problem in found.problems] == visual
    assert all("no vision_config" in problem.problem for problem in found.problems)
    assert not found.form.vision


def test_mlx_with_mtp_is_refused():
    """Whether its MTP norms are shifted cannot be seen."""
    config = hub_config()
    weights = make_weights(config)
    mtp = {name: value for name, value in weights.items() if name.startswith("mtp.")}
    problems = recognised(config, to_mlx(weights) | mtp).problems
    assert ["MLX" in problem.problem for problem in problems] == [True]


def test_one_moved_convolution_among_others_is_not_mlx():
    config = hub_config()
    weights = make_weights(config)
    name = P + "layers.1.linear_attn.conv1d.weight"
    weights[name] = weights[name].transpose(1, 2)
    assert "axes are in another order" in only_problem(config, infos_of(weights))


def test_two_spellings_of_one_tensor_are_refused():
    config = hub_config()
    infos = infos_of(make_weights(config))
    twin = Q.replace(P, "model.")
    infos[twin] = replace(infos[Q], name=twin)
    assert f"{twin} is layers.3.self_attn.q_proj.weight a second time" in only_problem(
        config, infos
    )


def test_nothing_at_all_names_everything_that_is_missing():
    config = hub_config()
    found = recognise({}, read_config(config), RECOGNISERS)
    assert found.atoms == {}
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= {p.tensor for p in found.problems}


@pytest.mark.parametrize("moe", [False, True])
def test_the_wrong_kind_of_mlp_is_refused(moe):
    weights = make_weights(hub_config(moe=moe))
    problems = recognised(hub_config(moe=not moe), weights).problems
    assert any("no place" in problem.problem for problem in problems)
    assert any("is missing" in problem.problem for problem in problems)


def test_an_untied_model_without_a_head_is_refused():
    config = hub_config()
    found = recognised(config, make_weights(config, Form(head=False)))
    assert [p.tensor for p in found.problems] == ["lm_head.weight"]
    assert "tie_word_embeddings false" in found.problems[0].problem
