"""Every layout in the wild gives the same atoms with the same values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from formats.family.config import read_config
from formats.family.layout import fused_group
from formats.family.names import TEXT
from formats.family.ops import apply_all
from formats.family.recognise import recognise
from formats.family.slots import Form
from formats.tensor import TensorInfo
from quant.fp8.scheme import FORMS
from quant.registry import RECOGNISERS
from tests.checkpoints import Weights, hub_config, make_weights, split_experts, text_config
from tests.formats.layouts import (
    Config,
    P,
    Q,
    infos_of,
    recognised,
    shiftable,
    to_fp8,
    to_mlx,
    to_next,
    without,
)

NO_MTP = Form(mtp_layers=0)


def values_of(config: Config, weights: Weights) -> Weights:
    layout = recognised(config, weights)
    assert layout.problems == []
    return {n: apply_all(a.ops, weights[a.stored]) for n, a in layout.atoms.items()}


def clean_values(weights: Weights) -> Weights:
    """Our names of hub weights, experts split: written out here, not asked of `formats`."""
    ours = {n.replace(P, "").replace("model.visual.", "visual."): w for n, w in weights.items()}
    return {n.removesuffix(".weight"): w for n, w in split_experts(ours).items()}


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        bytes_found = found[name].contiguous().view(torch.uint8)
        assert torch.equal(bytes_found, value.contiguous().view(torch.uint8)), name


def renamed(weights: Weights, old: str, new: str) -> Weights:
    return {new + n.removeprefix(old) if n.startswith(old) else n: w for n, w in weights.items()}


def hub_as_it_is(config: Config, weights: Weights) -> tuple[Config, Weights]:
    return config, weights


def text_only(config: Config, weights: Weights) -> tuple[Config, Weights]:
    return config["text_config"], renamed(without(weights, "model.visual."), P, "model.")


def text_class_with_hub_names(config: Config, weights: Weights) -> tuple[Config, Weights]:
    return config["text_config"], without(weights, "model.visual.")


def repeated_prefixes(config: Config, weights: Weights) -> tuple[Config, Weights]:
    return config, renamed(weights, P, P + "language_model.language_model.")


def vision_under_language_model(config: Config, weights: Weights) -> tuple[Config, Weights]:
    return config, renamed(weights, "model.visual.", P + "visual.")


def vllm_names(config: Config, weights: Weights) -> tuple[Config, Weights]:
    inner = renamed(
        renamed(weights, P, "language_model.model."), "lm_head", "language_model.lm_head"
    )
    return config, renamed(inner, "model.visual.", "vision_tower.")


def one_tensor_per_expert(config: Config, weights: Weights) -> tuple[Config, Weights]:
    return config, split_experts(weights)


def only_mtp_per_expert(config: Config, weights: Weights) -> tuple[Config, Weights]:
    backbone = without(weights, "mtp.")
    mtp = {name: value for name, value in weights.items() if name not in backbone}
    return config, backbone | split_experts(mtp)


def fp32_holder(config: Config, weights: Weights) -> tuple[Config, Weights]:
    return config, {n.replace(".A_log", "._fp32_params.A_log"): w for n, w in weights.items()}


def wrapped(config: Config, weights: Weights) -> tuple[Config, Weights]:
    """What training leaves: DDP around compile around FSDP, and a checkpointed MLP inside."""
    inner = {n.replace(".mlp.", "._checkpoint_wrapped_module.mlp."): w for n, w in weights.items()}
    return config, {f"module._orig_mod._fsdp_wrapped_module.{n}": w for n, w in inner.items()}


def peft_without_an_adapter(config: Config, weights: Weights) -> tuple[Config, Weights]:
    names = {n: n.replace("_proj.weight", "_proj.base_layer.weight") for n in weights}
    return config, {f"base_model.model.{names[n]}": w for n, w in weights.items()}


def buffers_beside(config: Config, weights: Weights) -> tuple[Config, Weights]:
    return config, weights | {name: torch.zeros(shape) for name, shape in BUFFERS.items()}


def copies_of_mtp(config: Config, weights: Weights) -> tuple[Config, Weights]:
    embed, head = weights[P + "embed_tokens.weight"], weights["lm_head.weight"]
    return config, weights | {"mtp.embed_tokens.weight": embed, "mtp.lm_head.weight": head}


BUFFERS = {
    P + "rotary_emb.inv_freq": (8,),
    P + "rotary_emb.original_inv_freq": (8,),
    P + "layers.3.self_attn.rotary_emb.inv_freq": (8,),
    P + "layers.3.self_attn.rotary_emb.cos_cached": (1, 1, 64, 16),
    P + "layers.3.self_attn.masked_bias": (),
    P + "layers.3.self_attn.bias": (1, 1, 64, 64),
    P + "layers.0.linear_attn.num_batches_tracked": (),
    "model.visual.rotary_pos_emb.inv_freq": (4,),
    "model.visual.embeddings.position_ids": (1, 16),
    "_orig_mod.rotary_emb.inv_freq": (8,),
}


def another_order(config: Config, weights: Weights) -> tuple[Config, Weights]:
    return config, dict(reversed(weights.items()))


LAYOUTS: list[Callable[[Config, Weights], tuple[Config, Weights]]] = [
    hub_as_it_is,
    text_only,
    text_class_with_hub_names,
    repeated_prefixes,
    vision_under_language_model,
    vllm_names,
    one_tensor_per_expert,
    only_mtp_per_expert,
    fp32_holder,
    wrapped,
    peft_without_an_adapter,
    buffers_beside,
    copies_of_mtp,
    another_order,
]


@pytest.mark.parametrize("sizes", ["ragged", "blocky"])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_every_layout_gives_the_same_values(layout, moe, sizes):
    config = hub_config(moe=moe, sizes=sizes)
    weights = make_weights(config)
    expected = clean_values(weights)
    changed_config, changed = layout(config, weights)
    if "vision_config" not in changed_config:
        expected = without(expected, "visual.")
    assert_same(values_of(changed_config, changed), expected)


@pytest.mark.parametrize("sizes", ["ragged", "blocky"])
@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
def test_mlx_gives_the_original_values(moe, sizes):
    config = hub_config(moe=moe, sizes=sizes)
    weights = shiftable(make_weights(config, NO_MTP))
    mlx = to_mlx(weights)
    assert mlx.keys() != weights.keys()
    assert_same(values_of(config, mlx), clean_values(weights))
    assert recognised(config, mlx).kind == "mlx"


@pytest.mark.parametrize("sizes", ["ragged", "blocky"])
def test_qwen3_next_gives_the_original_values(sizes):
    config = text_config(moe=True, sizes=sizes)
    weights = make_weights(config, Form(vision=False), namespace=TEXT)
    as_next = to_next(weights, config)
    found = values_of(config | {"model_type": "qwen3_next"}, as_next)
    assert_same(found, clean_values(renamed(weights, "model.", P)))
    assert recognised(config, as_next).kind == "next"


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (hub_as_it_is, "hub"),
        (repeated_prefixes, "hub"),
        (vision_under_language_model, "hub"),
        (vllm_names, "hub"),
        (wrapped, "hub"),
        (peft_without_an_adapter, "hub"),
        (text_only, "text"),
        (text_class_with_hub_names, "text"),
    ],
)
def test_the_kind_says_which_namespace_and_class_fit(layout, kind):
    config = hub_config()
    assert recognised(*layout(config, make_weights(config))).kind == kind


def test_what_was_put_right_is_noted():
    config = hub_config()
    weights = make_weights(config)
    assert recognised(config, weights).notes == []
    assert "repeated" in recognised(*repeated_prefixes(config, weights)).notes[0]
    assert "_fp32_params" in recognised(*fp32_holder(config, weights)).notes[0]
    assert [note.split()[3] for note in recognised(*wrapped(config, weights)).notes] == [
        "module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"
    ]  # fmt: skip
    assert recognised(*buffers_beside(config, weights)).notes[0].startswith("10 buffers")
    assert "to be a copy" in recognised(*copies_of_mtp(config, weights)).notes[0]
    mlx = recognised(
        config | {"text_config": text_config(mtp_num_hidden_layers=0)},
        to_mlx(without(weights, "mtp.")),
    )
    assert "MLX" in mlx.notes[0]
    assert recognised(config, without(weights, "mtp.")).notes == [
        "mtp_num_hidden_layers is 1, but the tensors hold 0 MTP layers"
    ]


def test_an_atom_keeps_the_stored_type_and_its_planned_shape():
    config = hub_config(moe=True)
    weights = make_weights(config)
    for atom in recognised(config, weights).atoms.values():
        value = apply_all(atom.ops, weights[atom.stored])
        assert tuple(value.shape) == atom.shape
        assert atom.dtype == ("F32" if value.dtype == torch.float32 else "BF16")


def test_engines_fuse_these_together():
    config = hub_config(moe=True)
    atoms = recognised(config, make_weights(config)).atoms
    groups: dict[str | None, set[str]] = {}
    for atom in atoms.values():
        groups.setdefault(atom.group, set()).add(atom.name)
    assert groups["layers.3.self_attn.qkv"] == {f"layers.3.self_attn.{x}_proj" for x in "qkv"}
    assert groups["layers.0.linear_attn.qkvz"] == {
        "layers.0.linear_attn.in_proj_qkv",
        "layers.0.linear_attn.in_proj_z",
    }
    assert groups["layers.0.linear_attn.ba"] == {
        "layers.0.linear_attn.in_proj_b",
        "layers.0.linear_attn.in_proj_a",
    }
    assert len(groups["layers.0.mlp.experts"]) == 3 * 4
    assert len(groups["layers.0.mlp.shared_expert.gate_up"]) == 2
    assert fused_group("layers.3.self_attn.o_proj", "o_proj") is None


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("layout", [hub_as_it_is, one_tensor_per_expert, text_only])
def test_fp8_blocks_find_their_scales(layout, moe):
    config = hub_config(moe=moe)
    changed_config, changed = layout(config, make_weights(config))
    fp8 = to_fp8(changed)
    found = recognised(changed_config, fp8)
    assert found.problems == []
    assert found.quantized == "fp8-block"
    for atom in found.atoms.values():
        coded = fp8[atom.stored].dtype == torch.float8_e4m3fn
        scales = (atom.stored + "_scale_inv",) if coded else ()
        assert atom.parts == (atom.stored, *scales)
        assert atom.dtype in ("BF16", "F32")


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((4, 1), "fp8-block"),
        ((4, 1, 1, 1), "fp8-block"),
        ((512, 1), "fp8-channel"),
        ((512,), "fp8-channel"),
        ((1,), "fp8-tensor"),
        ((), "fp8-tensor"),
        ((1, 1), "fp8-tensor"),
    ],
)
@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16", "F8_E8M0"])
@pytest.mark.parametrize("codes", ["F8_E4M3", "F8_E5M2"])
def test_a_scale_is_recognised_by_its_shape(shape, kind, suffix, dtype, codes):
    config = hub_config()
    infos = infos_of(make_weights(config))
    infos[Q] = replace(infos[Q], dtype=codes)
    infos[Q + suffix] = TensorInfo(Q + suffix, dtype, shape)
    found = recognise(infos, read_config(config), RECOGNISERS)
    assert found.problems == []
    assert found.quantized == kind
    assert found.atoms["layers.3.self_attn.q_proj"].parts == (Q, Q + suffix)


def test_stacked_weights_have_stacked_scales():
    assert {form.name: form.grid((4, 300, 130)) for form in FORMS} == {
        "fp8-block": (4, 3, 2),
        "fp8-channel": (4, 300, 1),
        "fp8-tensor": (1,),
    }


def test_of_two_scales_of_one_weight_one_is_left_over():
    config = hub_config()
    infos = infos_of(make_weights(config))
    infos[Q] = replace(infos[Q], dtype="F8_E4M3")
    for suffix in ("_scale", "_scale_inv"):
        infos[Q + suffix] = TensorInfo(Q + suffix, "BF16", (4, 1))
    found = recognise(infos, read_config(config), RECOGNISERS)
    assert found.atoms["layers.3.self_attn.q_proj"].parts == (Q, Q + "_scale_inv")
    assert [problem.tensor for problem in found.problems] == [Q + "_scale"]


@pytest.mark.parametrize(
    ("flags", "head", "tied", "note"),
    [
        ((True, True), False, True, None),
        ((False, True), False, True, "disagree"),
        ((True, False), False, True, "disagree"),
        ((False, False), True, False, None),
        ((True, True), True, False, "lm_head is present"),
    ],
)
def test_tying_is_decided_by_the_tensors(flags, head, tied, note):
    config = hub_config(tie_word_embeddings=flags[1]) | {"tie_word_embeddings": flags[0]}
    found = recognised(config, make_weights(config, Form(head=head)))
    assert found.problems == []
    assert found.tied is tied
    assert ("lm_head" in found.atoms) is head
    assert [note in text for text in found.notes] == ([True] if note else [])


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_other_float_types_are_kept(dtype):
    config = hub_config()
    infos = infos_of(make_weights(config))
    infos[Q] = replace(infos[Q], dtype=dtype)
    found = recognise(infos, read_config(config), RECOGNISERS)
    assert found.problems == []
    assert found.atoms["layers.3.self_attn.q_proj"].dtype == dtype


def test_a_vision_config_without_vision_is_a_text_model():
    config = hub_config()
    found = recognised(config, without(make_weights(config), "model.visual."))
    assert found.problems == []
    assert not found.form.vision


@pytest.mark.all
def test_many_experts_with_scales_are_recognised_in_linear_time():
    """60,000 names; a quadratic search takes minutes."""
    config = read_config(text_config(moe=True, num_experts=2500))
    weight, scale = (128, 128), (1, 1)
    infos = infos_of(make_weights(text_config(moe=True), Form(vision=False, mtp_layers=0)))
    infos = {n: i for n, i in infos.items() if "experts" not in n.split(".")}
    router = [n for n in infos if n.endswith("mlp.gate.weight")]
    infos |= {n: replace(infos[n], shape=(2500, 128)) for n in router}
    for layer in range(4):
        for e in range(2500):
            for part in ("gate", "up", "down"):
                name = f"{P}layers.{layer}.mlp.experts.{e}.{part}_proj.weight"
                infos[name] = TensorInfo(name, "F8_E4M3", weight)
                infos[name + "_scale_inv"] = TensorInfo(name + "_scale_inv", "BF16", scale)
    found = recognise(infos, config, RECOGNISERS)
    assert found.problems == []
    assert len(found.atoms) > 30_000


@pytest.mark.parametrize("name", ["layers.3.self_attn.bias", "layers.0.mlp.up_proj.bias"])
def test_a_bias_is_no_buffer(name):
    config = hub_config()
    found = recognised(config, make_weights(config) | {P + name: torch.zeros(128)})
    assert [problem.tensor for problem in found.problems] == [P + name]
    assert found.buffers == ()


def test_an_embedding_of_mtp_of_another_shape_is_no_copy():
    config = hub_config()
    found = recognised(
        config, make_weights(config) | {"mtp.embed_tokens.weight": torch.zeros(2, 2)}
    )
    assert found.copies == {}
    assert [problem.part for problem in found.problems] == ["mtp"]
    assert "is not a copy of embed_tokens.weight" in found.problems[0].problem
