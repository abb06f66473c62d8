"""Types of tensors: llama.cpp's held to what its llama_model_quantize wrote, ours to our promises.

`golden/llama_quantize.json` was written by that function (build v0.5.0) from BF16 files of these
shapes: by case and mix, `TYPE TYPE:blocks` of the kinds of tensors that it holds for.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path

import gguf
import pytest

from formats.family.config import read_config
from formats.family.ops import shape_after
from formats.family.roles import ROLES
from formats.family.slots import Form, family
from formats.gguf.names import gguf_name, ops_to_gguf
from quant.errors import QuantError
from quant.ggml import kinds
from quant.mix.choose import FILE_TYPES, Choice, choose
from quant.mix.ours_table import BELOW, LADDERS, OWN, OWN_AND_ABOVE
from quant.mix.tensors import Facts, MixTensor
from quant.policy import PolicyRule

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "llama_quantize.json").read_text())
SMALL = {
    "vocab_size": 64, "hidden_size": 256, "head_dim": 64, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
LARGE = {
    "vocab_size": 248320,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
}
COMMON = {
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
# layers, query heads, key heads, width of the feed-forward, experts, tied, MTP, other sizes
CASES = {
    "dense24-tied": (24, 4, 2, 256, 0, True, False, SMALL),
    "dense24-tied-mtp": (24, 4, 2, 256, 0, True, True, SMALL),
    "dense32-gqa4": (32, 8, 2, 256, 0, False, True, SMALL),
    "moe8": (8, 4, 2, 256, 8, False, True, SMALL),
    "moe16": (24, 8, 1, 256, 16, False, True, SMALL),
    "odd": (4, 4, 2, 80, 0, False, True, SMALL | {"hidden_size": 96}),
    "0.8B": (24, 8, 2, 3584, 0, True, True,
             LARGE | {"hidden_size": 1024, "linear_num_value_heads": 16}),
    "9B": (32, 16, 4, 12288, 0, False, True,
           LARGE | {"hidden_size": 4096, "linear_num_value_heads": 32}),
    "27B": (64, 24, 4, 17408, 0, False, True,
            LARGE | {"hidden_size": 5120, "linear_num_value_heads": 48}),
    "35B-A3B": (40, 16, 2, 512, 256, False, True,
                LARGE | {"hidden_size": 2048, "linear_num_value_heads": 32}),
}  # fmt: skip
RELEASED = ("0.8B", "9B", "27B", "35B-A3B")
QUANTISED = tuple(mix for mix in FILE_TYPES if mix not in {"f32", "f16", "bf16"})
DOWN = "layers.*.mlp.down_proj"


@cache
def case(name: str, *, imatrix: bool = False) -> tuple[tuple[MixTensor, ...], Facts]:
    """Return the tensors of a file in the order of the family, and the facts."""
    layers, heads, kv, width, experts, tied, mtp, sizes = CASES[name]
    about = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv}
    kind = {"model_type": "qwen3_5_text", "intermediate_size": width}
    if experts:
        kind = {
            "model_type": "qwen3_5_moe_text",
            "num_experts": experts,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": width,
            "shared_expert_intermediate_size": width,
        }
    config = read_config(COMMON | sizes | about | kind)
    form = Form("split", "split", int(mtp), vision=False, head=not tied)
    found: dict[str, MixTensor] = {}
    for slot in family(config.sizes, config.layer_types, form):
        at, index = gguf_name(slot.hub, layers)
        shape = shape_after(ops_to_gguf(slot.rule.role, config.sizes), slot.shape)
        names = (*(found[at].weights if at in found else ()), slot.name)
        whole = shape if index is None else (len(names), *shape)
        found[at] = MixTensor(at, slot.rule.role, whole, names)
    return tuple(found.values()), Facts(layers, experts, heads // kv, tied, imatrix)


@cache
def chosen_for(
    name: str, mix: str, *, imatrix: bool = False, like_llama_cpp: bool = False
) -> dict[str, Choice]:
    return choose(mix, *case(name, imatrix=imatrix), like_llama_cpp=like_llama_cpp)


def types(chosen: dict[str, Choice]) -> dict[str, str]:
    return {name: choice.type for name, choice in chosen.items()}


def nbytes(name, mix, *, imatrix=False, like_llama_cpp) -> int:
    chosen = chosen_for(name, mix, imatrix=imatrix, like_llama_cpp=like_llama_cpp)
    return sum(
        prod(t.shape[:-1]) * kinds.row_bytes(chosen[t.name].type, t.shape[-1])
        for t in case(name, imatrix=imatrix)[0]
    )


def recorded(record: dict[str, str], tensor: MixTensor) -> str:
    """Return the type that a golden record has for a tensor."""
    rule = next(rule for rule, held in record.items() if tensor.kind in held.split())
    usual, *others = rule.split()
    for type_, _, blocks in (other.partition(":") for other in others):
        if str(tensor.block) in blocks.split(","):
            return type_
    return usual


@pytest.mark.parametrize(("name", "mix"), [(n, m) for n, mixes in GOLDEN.items() for m in mixes])
def test_llama_cpp_rules_choose_what_llama_quantize_chose(name, mix):
    scheme, _, imatrix = mix.partition(" ")
    tensors, _ = case(name, imatrix=bool(imatrix))
    theirs = {tensor.name: recorded(GOLDEN[name][mix], tensor) for tensor in tensors}
    chosen = chosen_for(name, scheme, imatrix=bool(imatrix), like_llama_cpp=True)
    assert types(chosen) == theirs


def test_the_order_of_the_tensors_in_the_file_does_not_matter():
    tensors, facts = case("moe16")
    for like in (True, False):
        there = choose("q4_k_m", tensors, facts, like_llama_cpp=like)
        back = choose("q4_k_m", tensors[::-1], facts, like_llama_cpp=like)
        assert there == back


def test_file_types_are_those_of_the_gguf_package():
    ids = {name: kind.value for name, kind in gguf.LlamaFileType.__members__.items()}
    known = {"f32": "ALL_F32", "q4_k_m": "MOSTLY_Q4_K_M", "mxfp4_moe": "MOSTLY_MXFP4_MOE"}
    for mix, number in FILE_TYPES.items():
        name = known.get(mix, f"MOSTLY_{mix.upper()}")
        assert ids.get(name, number) == number, mix


@pytest.mark.parametrize("mix", sorted(set(LADDERS) - set(OWN_AND_ABOVE)))
@pytest.mark.parametrize("name", RELEASED)
def test_ours_takes_no_more_bytes_than_llama_cpp_and_leaves_few(name, mix):
    ours, theirs = (nbytes(name, mix, imatrix=True, like_llama_cpp=like) for like in (False, True))
    assert 0.998 * theirs <= ours <= theirs


@pytest.mark.parametrize("mix", QUANTISED)
@pytest.mark.parametrize("name", RELEASED)
def test_what_ours_may_not_lower_takes_at_most_half_a_percent_more_bytes(name, mix):
    ours, theirs = (nbytes(name, mix, like_llama_cpp=like) for like in (False, True))
    assert ours <= 1.005 * theirs


@pytest.mark.parametrize("mix", ["f32", "f16", "bf16"])
def test_plain_mixes_are_the_same_in_both(mix):
    tensors, facts = case("moe16")
    ours = types(choose(mix, tensors, facts))
    assert ours == types(choose(mix, tensors, facts, like_llama_cpp=True))
    free = {t.name for t in tensors if not ROLES[t.role].gguf_f32}
    assert {ours[name] for name in free} == {mix.upper()}


@pytest.mark.parametrize("imatrix", [False, True])
@pytest.mark.parametrize("mix", QUANTISED)
@pytest.mark.parametrize("name", ["27B", "35B-A3B"])
def test_ours_keeps_what_the_delta_rule_compounds_and_goes_little_below_the_mix(name, mix, imatrix):
    tensors, facts = case(name, imatrix=imatrix)
    chosen = types(chosen_for(name, mix, imatrix=imatrix))
    bits = {
        t: 8 * kinds.block(t)[1] / kinds.block(t)[0]
        for t in (*kinds.LOOPS, *kinds.SUPER_BLOCKS, "F32", "F16")
    }
    least = bits[OWN[mix]] - (BELOW if imatrix and mix not in OWN_AND_ABOVE else 0)
    for tensor in tensors:
        if ROLES[tensor.role].gguf_f32 or tensor.kind in {"ssm_alpha", "ssm_beta"}:
            assert chosen[tensor.name] == "F32", tensor.name
        in_head = tensor.block >= facts.num_layers
        assert bits[chosen[tensor.name]] >= (bits[OWN[mix]] if in_head else least), tensor.name
    assert chosen[f"blk.{facts.num_layers}.nextn.eh_proj.weight"] == "Q8_0"


@pytest.mark.parametrize("mix", ["iq4_xs", "iq3_s", "q4_k_m", "q3_k_m", "q2_k"])
@pytest.mark.parametrize("name", RELEASED)
def test_without_an_importance_matrix_ours_asks_for_no_type_that_needs_one(name, mix):
    assert not kinds.POOR_UNWEIGHTED & set(types(chosen_for(name, mix)).values())


@pytest.mark.parametrize("mix", sorted(LADDERS))
def test_the_embedding_has_no_type_that_cannot_do_without_a_matrix(mix):
    embedding = chosen_for("27B", mix, imatrix=True)["token_embd.weight"]
    assert embedding.type not in kinds.WEIGHTED_ONLY


@pytest.mark.parametrize("mix", ["iq3_s", "q2_k", "q3_k_m", "q4_k_m"])
def test_what_a_matrix_does_not_know_asks_for_none(mix):
    tensors, facts = case("27B", imatrix=True)
    unknown = frozenset(t.name for t in tensors if t.kind in {"ffn_up", "attn_qkv"})
    chosen = choose(mix, tensors, replace(facts, unknown=unknown), like_llama_cpp=False)
    assert kinds.POOR_UNWEIGHTED.isdisjoint(chosen[name].type for name in unknown)


@pytest.mark.parametrize("mix", ["iq2_xxs", "iq2_m", "iq3_xxs"])
def test_a_head_that_a_matrix_of_llama_cpp_does_not_know_can_be_encoded(mix):
    tensors, facts = case("27B", imatrix=True)
    facts = replace(facts, unknown=frozenset({"output.weight"}))
    head = choose(mix, tensors, facts, like_llama_cpp=False)["output.weight"]
    assert head.type not in kinds.WEIGHTED_ONLY


def test_beside_experts_everything_in_a_large_q4_k_m_is_q8_0_or_nearly():
    tensors, facts = case("35B-A3B")
    chosen = choose("q4_k_m", tensors, facts)
    least = {
        chosen[t.name].type
        for t in tensors
        if t.block >= 0 and t.role != "expert" and not ROLES[t.role].gguf_f32
    }
    assert least <= {"Q8_0", "Q6_K", "F32"}


@pytest.mark.parametrize("imatrix", [False, True])
def test_mxfp4_moe_keeps_all_experts_in_mxfp4(imatrix):
    tensors, facts = case("35B-A3B", imatrix=imatrix)
    chosen = choose("mxfp4_moe", tensors, facts)
    assert {chosen[t.name].type for t in tensors if t.role == "expert"} == {"MXFP4"}


def test_a_type_whose_blocks_do_not_fit_the_rows_is_replaced_and_said_so():
    tensors, facts = case("odd")
    for like in (True, False):
        choice = choose("q4_k_m", tensors, facts, like_llama_cpp=like)["blk.0.ffn_down.weight"]
        assert choice.type == "F16"
        assert choice.fallback is like, "ours asks for nothing that does not fit"
    choice = choose("q4_k_m", tensors, facts, (PolicyRule(DOWN, "q6_k"),))["blk.0.ffn_down.weight"]
    assert choice == Choice(
        "F16", f"rule {DOWN}; F16, for 80 columns are not whole blocks of Q6_K", fallback=True
    )


def test_a_rule_decides_before_the_mix_and_the_first_that_matches_wins():
    tensors, facts = case("dense24-tied-mtp")
    rules = (PolicyRule("layers.3.*.down_proj", "f16"), PolicyRule(DOWN, "iq4_nl"))
    for like in (True, False):
        chosen = choose("q4_k_m", tensors, facts, rules, like_llama_cpp=like)
        assert chosen["blk.3.ffn_down.weight"] == Choice("F16", "rule layers.3.*.down_proj")
        assert chosen["blk.4.ffn_down.weight"] == Choice("IQ4_NL", f"rule {DOWN}")
        assert chosen["blk.24.ffn_down.weight"].type != "IQ4_NL", "mtp.layers.0 is no layers.*"


def test_a_rule_for_all_experts_of_a_projection_decides_its_stack():
    tensors, facts = case("moe16")
    rules = (PolicyRule("layers.2.mlp.experts.*.up_proj", "q8_0"),)
    chosen = choose("q4_k_m", tensors, facts, rules)
    assert chosen["blk.2.ffn_up_exps.weight"].type == "Q8_0"
    assert chosen["blk.2.ffn_gate_exps.weight"].reason.startswith("ours: q4_k_m")


@pytest.mark.parametrize("scheme", ["f32", "f16", "bf16", "q8_0"])
def test_the_projections_of_decay_and_beta_may_be_float_or_q8_0(scheme):
    tensors, facts = case("moe16")
    chosen = choose("q4_k_m", tensors, facts, (PolicyRule("*.in_proj_[ab]", scheme),))
    assert chosen["blk.0.ssm_alpha.weight"].type == scheme.upper()
    assert chosen["blk.0.ssm_beta.weight"].type == scheme.upper()


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ([("layers.*.mlp.experts.3.up_proj", "q8_0")], "ffn_up_exps.weight holds all experts"),
        ([("*.experts.[0-3].*", "q8_0"), ("*.experts.*", "q6_k")], "the rules would part them"),
        ([("*.in_proj_a", "q6_k")], "role in_proj_a is protected,\n  expected f32, f16, bf16 or"),
        ([("layers.0.mlp.gate", "bf16")], "role router is protected,\n  expected f32, or a glob"),
        ([("*.conv1d", "f16")], "role conv1d is protected"),
        ([("*_layernorm", "q8_0")], "role norm is protected"),
        ([("layers.*.mlp.down", "q8_0")], "matches no weight"),
        ([("*.o_proj", "q8_0"), ("*.o_proj", "q6_k")], "decides nothing"),
        ([("*.o_proj", "fp8-block")], "type 'fp8-block' is not known"),
        ([("*.o_proj", "keep")], "type 'keep' is not known"),
        ([("embed_tokens", "nvfp4")], "reads no NVFP4 scale of the embedding"),
        ([("embed_tokens", "NVFP4")], "reads no NVFP4 scale of the embedding"),
    ],
)
def test_rules_that_cannot_be_are_refused(rules, says):
    tensors, facts = case("moe16")
    with pytest.raises(QuantError, match=says):
        choose("q4_k_m", tensors, facts, [PolicyRule(*rule) for rule in rules])


def test_a_mix_that_is_not_known_is_refused_with_the_nearest():
    with pytest.raises(QuantError, match=r"mix 'q4_km' is not known, did you mean 'q4_k_m'\?"):
        choose("q4_km", *case("odd"))
