"""A file's types tell which mix it is: exactly, or as far as its exceptions leave it."""

from __future__ import annotations

import pytest

from quant.mix.choose import FILE_TYPES, choose
from quant.mix.identify import MAIN_TYPES, exact_mixes, may_be_called
from quant.mix.tensors import Facts, MixTensor

LAYERS, WIDTH = 16, 512
FACTS = Facts(num_layers=LAYERS, num_experts=0, gqa=4, tied=False, imatrix=False)


def tensors() -> list[MixTensor]:
    found = [
        MixTensor("token_embd.weight", "embed", (1024, WIDTH), ("embed_tokens",)),
        MixTensor("output.weight", "lm_head", (1024, WIDTH), ("lm_head",)),
    ]
    for i in range(LAYERS):
        rows = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
        rows |= {"ffn_gate": "gate_proj", "ffn_up": "up_proj", "ffn_down": "down_proj"}
        found += [
            MixTensor(f"blk.{i}.{kind}.weight", role, (WIDTH, WIDTH), (f"layers.{i}.{kind}",))
            for kind, role in rows.items()
        ]
        found.append(MixTensor(f"blk.{i}.attn_norm.weight", "norm", (WIDTH,), (f"layers.{i}.n",)))
    return found


def types_of(mix: str, *, theirs: bool) -> dict[str, str]:
    chosen = choose(mix, tensors(), FACTS, like_llama_cpp=theirs)
    return {name: choice.type for name, choice in chosen.items()}


@pytest.mark.parametrize("theirs", [True, False], ids=["llama.cpp", "ours"])
@pytest.mark.parametrize("mix", FILE_TYPES)
def test_a_mix_is_told_from_its_types(mix, theirs):
    found = exact_mixes(types_of(mix, theirs=theirs), tensors(), FACTS)
    assert found[mix] == FILE_TYPES[mix]
    # a dense model's MXFP4_MOE is Q8_0
    assert set(found) == ({"q8_0", "mxfp4_moe"} if mix in {"q8_0", "mxfp4_moe"} else {mix})


def test_with_an_exception_no_mix_is_exact():
    types = types_of("q4_k_m", theirs=True) | {"blk.3.attn_q.weight": "F16"}
    assert exact_mixes(types, tensors(), FACTS) == {}
    assert may_be_called(FILE_TYPES["q4_k_m"], types.values())


@pytest.mark.parametrize(
    ("number", "types", "may"),
    [
        (15, {"Q4_K", "Q6_K", "Q8_0"}, True),
        (15 + 1024, {"Q4_K"}, True),
        (12, {"IQ3_S", "IQ4_XS"}, True),
        (2, {"Q8_0"}, False),
        (7, {"Q8_0", "BF16"}, True),
        (7, {"Q4_K", "Q5_K"}, False),
        (99, {"Q4_K"}, False),
    ],
)
def test_some_tensors_have_about_the_bits_of_the_file_type(number, types, may):
    assert may_be_called(number, types) is may


def test_every_file_type_that_we_write_has_a_main_type():
    assert set(FILE_TYPES.values()) <= set(MAIN_TYPES)
