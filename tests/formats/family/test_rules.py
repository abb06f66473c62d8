"""The family table, held to the published checkpoints' tensor counts and sizes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formats.family.config import Config, read_config
from formats.family.config_fields import DENSE_FIELDS, MOE_FIELDS, TEXT_FIELDS, VISION_FIELDS
from formats.family.roles import ROLES
from formats.family.rules import LAYER_PREFIXES, RULES, template
from formats.family.slots import Form, Slot, dimension, family

TEXT = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_value_heads",
)
MOE = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)
VISION = ("depth", "hidden_size", "intermediate_size", "num_heads")
LARGE_VISION = (27, 1152, 4304, 16)
TIED = Form(head=False)
SPLIT_MTP = Form(mtp_experts="split")
TEXT_ONLY = Form(vision=False)
NEXT = Form(vision=False, experts="split", mtp_experts="split", gdn_in="fused")

# name: (text sizes, dense or expert sizes, vision sizes, form)
MODELS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Form]] = {
    "0.8B": ((1024, 24, 8, 2, 16), (3584,), (12, 768, 3072, 12), TIED),
    "2B": ((2048, 24, 8, 2, 16), (6144,), (24, 1024, 4096, 16), TIED),
    "4B": ((2560, 32, 16, 4, 32), (9216,), (24, 1024, 4096, 16), TIED),
    "9B": ((4096, 32, 16, 4, 32), (12288,), LARGE_VISION, Form()),
    "27B": ((5120, 64, 24, 4, 48), (17408,), LARGE_VISION, Form()),
    "3.5-35B": ((2048, 40, 16, 2, 32), (256, 8, 512, 512), LARGE_VISION, SPLIT_MTP),
    "3.6-35B": ((2048, 40, 16, 2, 32), (256, 8, 512, 512), LARGE_VISION, Form()),
    "122B": ((3072, 48, 32, 2, 64), (256, 8, 1024, 1024), LARGE_VISION, SPLIT_MTP),
    "397B": ((4096, 60, 32, 2, 64), (512, 10, 1024, 1024), LARGE_VISION, SPLIT_MTP),
    "2.4T": ((8192, 92, 64, 4, 128), (512, 10, 2048, 2048), (), TEXT_ONLY),
    "Next-80B": ((2048, 48, 16, 2, 32), (512, 10, 512, 512), (), NEXT),
    "Coder-Next": ((2048, 48, 16, 2, 32), (512, 10, 512, 512), (), replace(NEXT, mtp_layers=0)),
}
# (model, whether A_log and the delta rule's norm are F32, tensors, parameters, bytes)
PUBLISHED = [
    ("0.8B", True, 488, 873_438_784, 1_746_882_752),
    ("2B", True, 632, 2_274_069_824, 4_548_144_832),
    ("4B", True, 738, 4_659_865_088, 9_319_737_856),
    ("9B", True, 775, 9_653_104_368, 19_306_216_416),
    ("27B", True, 1199, 27_781_427_952, 55_562_872_800),  # 3.5
    ("27B", False, 1199, 27_781_427_952, 55_562_855_904),  # 3.6 and 3.8
    ("3.5-35B", True, 1811, 35_951_822_704, 71_903_655_008),
    ("3.6-35B", False, 1045, 35_951_822_704, 71_903_645_408),
    ("122B", True, 1949, 125_086_497_008, 250_173_007_840),
    ("397B", True, 2924, 403_397_928_944, 806_795_875_168),
    ("2.4T", False, 1609, 2_446_182_725_504, 4_892_365_451_008),
    ("Next-80B", False, 75_944, 81_324_862_720, 162_649_725_440),
    ("Coder-Next", False, 74_391, 79_674_391_296, 159_348_782_592),
]
F32_ROLES = ("A_log", "gdn_norm")


def config_of(model: str) -> Config:
    """Return the released config, as far as it says sizes; all families share the rest."""
    sizes, ffn, vision, form = MODELS[model]
    moe = len(ffn) > 1
    text: dict[str, Any] = dict(zip(TEXT, sizes, strict=True))
    text |= dict(zip(MOE if moe else ("intermediate_size",), ffn, strict=True))
    text |= {
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "full_attention_interval": 4,
        "vocab_size": 151_936 if form.gdn_in == "fused" else 248_320,
        "rope_theta": 1e7,
        "model_type": "qwen3_5_moe_text" if moe else "qwen3_5_text",
    }
    if not vision:
        return read_config(text)
    out = {"out_hidden_size": text["hidden_size"]}
    seen = dict(zip(VISION, vision, strict=True)) | out
    return read_config({"text_config": text, "vision_config": seen})


def slots_of(model: str) -> list[Slot]:
    config = config_of(model)
    return list(family(config.sizes, config.layer_types, MODELS[model][3]))


@pytest.mark.parametrize(("model", "f32", "tensors", "parameters", "nbytes"), PUBLISHED)
def test_a_released_model_has_the_published_counts_and_bytes(
    model, f32, tensors, parameters, nbytes
):
    slots = slots_of(model)
    sizes = [prod(slot.shape) for slot in slots]
    widths = [4 if f32 and slot.rule.role in F32_ROLES else 2 for slot in slots]
    assert len(slots) == tensors
    assert sum(sizes) == parameters
    assert sum(n * width for n, width in zip(sizes, widths, strict=True)) == nbytes


@pytest.mark.parametrize(("model", "f32"), [("0.8B", 36), ("397B", 90)])
def test_two_tensors_of_each_delta_layer_are_f32_in_3_5(model, f32):
    assert sum(slot.rule.role in F32_ROLES for slot in slots_of(model)) == f32


@pytest.mark.parametrize("model", ["0.8B", "3.5-35B", "2.4T", "Coder-Next"])
def test_every_name_is_unique_and_leads_back_to_its_rule(model):
    slots = slots_of(model)
    assert len({slot.hub for slot in slots}) == len({slot.name for slot in slots}) == len(slots)
    for slot in slots:
        key, numbers = template(slot.hub)
        rule = RULES[key]
        left = list(numbers)
        assert (rule.role, rule.shape) == (slot.rule.role, slot.rule.shape)
        assert (
            ".".join(str(left.pop(0)) if s in ("{i}", "{e}") else s for s in rule.hub.split("."))
            == slot.hub
        )
        assert left == []


@given(
    kinds=st.lists(st.sampled_from(["linear_attention", "full_attention"]), min_size=1, max_size=9),
    mtp=st.integers(0, 2),
    depth=st.integers(1, 5),
    form=st.sampled_from([Form(), Form(vision=False), Form(head=False)]),
)
def test_the_number_of_tensors_follows_from_the_layers(kinds, mtp, depth, form):
    """GDN mixers have 9 tensors, attention 6, an MLP 3, a layer 2 norms, vision 12 d + 9."""
    sizes = config_of("9B").sizes | {"vD": depth}
    count = Counter(kinds)
    expected = 2 + 14 * count["linear_attention"] + 11 * count["full_attention"] + form.head
    expected += (4 + 11 * mtp if mtp else 0) + (12 * depth + 9 if form.vision else 0)
    assert len(list(family(sizes, tuple(kinds), replace(form, mtp_layers=mtp)))) == expected


@pytest.mark.parametrize("rule", RULES.values(), ids=lambda rule: rule.hub)
def test_every_symbol_of_a_shape_is_a_field_of_the_config(rule):
    known = {*TEXT_FIELDS, *DENSE_FIELDS, *MOE_FIELDS, *VISION_FIELDS}
    symbols = set(rule.shape.replace("*", " ").replace("+", " ").replace(",", " ").split())
    assert {s for s in symbols if not s.isdigit()} <= known


def test_every_role_of_the_table_has_a_row_and_every_row_a_tensor():
    assert ROLES.keys() == {rule.role for rule in RULES.values()}


def test_four_norms_are_not_all_the_same():
    """w of the delta rule's norm is plain, all other text norms are stored as w of 1 + w."""
    roles = {key.removeprefix("mtp."): rule.role for key, rule in RULES.items() if "norm" in key}
    plain = {key for key, role in roles.items() if role == "gdn_norm"}
    assert plain == {"layers.#.linear_attn.norm.weight"}
    vision = {key for key, role in roles.items() if key.startswith("visual.")}
    assert {roles[key] for key in vision} == {"vision"}
    assert {roles[key] for key in roles.keys() - vision - plain} == {"norm"}


def test_a_dimension_is_a_sum_of_products():
    sizes = {"NK": 2, "DK": 3, "NV": 5, "DV": 7}
    assert dimension("2*NK*DK+NV*DV", sizes) == 47
    assert dimension("1", sizes) == 1
    with pytest.raises(KeyError, match="XX"):
        dimension("XX", sizes)


@pytest.mark.parametrize(
    "name",
    [
        "layers.#.input_layernorm.weight",
        "layers.03.input_layernorm.weight",
        "layers.-1.input_layernorm.weight",
        "layers.+1.input_layernorm.weight",
        "layers.\u0663.input_layernorm.weight",
        "layers.\u00b2.input_layernorm.weight",
        "layers." + "9" * 5000 + ".input_layernorm.weight",
        "layers..input_layernorm.weight",
        "mtp.layers.#.input_layernorm.weight",
        "",
    ],
)
def test_a_name_that_no_table_wrote_has_no_rule(name):
    assert template(name)[0] not in RULES


def test_layers_of_the_backbone_and_of_mtp_have_the_same_rules():
    backbone, mtp = (prefix.replace("{i}", "#") for prefix in LAYER_PREFIXES)
    ours = {key.removeprefix(backbone) for key in RULES if key.startswith(backbone)}
    assert ours == {key.removeprefix(mtp) for key in RULES if key.startswith(mtp)}
