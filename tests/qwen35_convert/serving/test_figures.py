"""Serving figures, against what vLLM logs and what its loaders refuse."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen35_convert.serving.figures import (
    CACHE,
    WEIGHTS,
    attention_block_size,
    max_tensor_parallel,
    serving,
    state_bytes,
    token_bytes,
)

COMMON = {"HD": 256, "NK": 16, "DK": 128, "DV": 128, "K": 4, "V": 248320}
SIZES = {
    "0.8B": COMMON | {"H": 1024, "NH": 8, "NKV": 2, "NV": 16, "I": 3584},
    "2B": COMMON | {"H": 2048, "NH": 8, "NKV": 2, "NV": 16, "I": 6144},
    "4B": COMMON | {"H": 2560, "NH": 16, "NKV": 4, "NV": 32, "I": 9216},
    "9B": COMMON | {"H": 4096, "NH": 16, "NKV": 4, "NV": 32, "I": 12288},
    "27B": COMMON | {"H": 5120, "NH": 24, "NKV": 4, "NV": 48, "I": 17408},
    "35B": COMMON | {"H": 2048, "NH": 16, "NKV": 2, "NV": 32, "E": 256, "F": 512, "S": 512},
    "122B": COMMON | {"H": 3072, "NH": 32, "NKV": 2, "NV": 64, "E": 256, "F": 1024, "S": 1024},
    "397B": COMMON | {"H": 4096, "NH": 32, "NKV": 2, "NV": 64, "E": 512, "F": 1024, "S": 1024},
}
LAYERS = {"0.8B": (18, 6), "4B": (24, 8), "27B": (48, 16), "35B": (30, 10), "397B": (45, 15)}
# model: N at A=16, A=64, FP8 KV, BF16 state, 3 speculative tokens, TP 2, 4, 8
BLOCKS = {
    "0.8B": (544, 576, 1072, 288, 560, 544, 272, 144),
    "2B": (544, 576, 1072, 288, 560, 544, 272, 144),
    "4B": (528, 576, 1056, 272, 544, 528, 528, 272),
    "9B": (528, 576, 1056, 272, 544, 528, 528, 272),
    "27B": (784, 832, 1568, 400, 800, 784, 784, 400),
    "35B": (1056, 1088, 2096, 544, 1072, 1056, 528, 272),
    "122B": (2096, 2112, 4176, 1072, 2128, 2096, 1056, 528),
    "397B": (2096, 2112, 4176, 1072, 2128, 2096, 1056, 528),
}
CONDITIONS = (
    {},
    {"kernel_block": 64},
    {"kv_bytes": 1},
    {"ssm_bytes": 2},
    {"num_drafts": 3},
    {"tp": 2},
    {"tp": 4},
    {"tp": 8},
)


def figures(size: str, **more):
    gdn, full = LAYERS[size]
    return serving(SIZES[size], num_full_layers=full, num_gdn_layers=gdn, **more)


@pytest.mark.parametrize("model", BLOCKS)
def test_the_block_size_is_vllms(model):
    found = tuple(attention_block_size(SIZES[model], **c) for c in CONDITIONS)
    assert found == BLOCKS[model]


@pytest.mark.parametrize(("model", "logged"), [("0.8B", 544), ("4B", 528), ("27B", 784)])
def test_the_block_size_is_what_vllm_was_seen_to_log(model, logged):
    """LMCache's recipe documents 0.8B and 27B; vllm issue 40696 shows 4B."""
    assert figures(model).as_dict()["attention_block_size"]["bf16"] == logged


def test_one_state_of_the_smallest_model_is_a_megabyte_and_its_window():
    window, state = 6144 * 3 * 2, 16 * 128 * 128 * 4
    assert (window, state) == (36864, 1048576)
    assert state_bytes(SIZES["0.8B"]) == window + state
    assert figures("0.8B").state_bytes_per_sequence == 18 * (window + state)


def test_only_full_layers_keep_keys_and_values():
    assert token_bytes(SIZES["0.8B"]) == 2048
    assert figures("0.8B").kv_bytes_per_token == 6 * 2048
    assert figures("397B").kv_bytes_per_token == 15 * 2048


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_share_the_state_and_repeat_the_last_key_head(tp):
    assert figures("27B", tp=tp).state_bytes_per_sequence * tp == 48 * state_bytes(SIZES["27B"])
    assert figures("27B", tp=tp).kv_bytes_per_token == 16 * 1024 * max(1, 4 // tp)


@pytest.mark.parametrize(
    ("model", "plain", "block"),
    [
        ("0.8B", 8, 4),  # 3584 / 8 = 3.5 blocks
        ("2B", 8, 8),  # 6144 / 8 = 6 blocks
        ("4B", 16, 8),  # 9216 / 16 = 4.5 blocks
        ("9B", 16, 16),
        ("27B", 8, 8),  # 24 query heads
        ("35B", 16, 4),  # the shared expert's 512 / 8 is half a block: vLLM does not start
        ("122B", 16, 8),
        ("397B", 16, 8),
    ],
)
def test_the_ranks_that_can_share_a_model(model, plain, block):
    assert max_tensor_parallel(SIZES[model], block_fp8=False) == plain
    assert max_tensor_parallel(SIZES[model], block_fp8=True) == block


@given(
    heads=st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(1, 8), st.integers(1, 8)),
    dims=st.sampled_from([64, 96, 128, 256]),
    inner=st.integers(1, 600),
)
def test_ranks_divide_every_head_and_every_block(heads, dims, inner):
    query, key, linear_key, ratio = heads
    sizes = COMMON | {
        "NH": query * key,
        "NKV": key,
        "NK": linear_key,
        "NV": linear_key * ratio,
        "HD": dims,
        "DK": dims,
        "DV": dims,
        "I": inner * 32,
    }
    plain = max_tensor_parallel(sizes, block_fp8=False)
    block = max_tensor_parallel(sizes, block_fp8=True)
    assert plain % block == 0
    assert all(sizes[k] % plain == 0 for k in ("NH", "NK", "NV"))
    if block > 1:
        assert sizes["I"] / block % 128 == 0
        assert all(sizes[n] / block * dims % 128 == 0 for n in ("NH", "NK", "NV"))


@given(st.sampled_from(sorted(SIZES)), st.sampled_from([1, 2, 4, 8]), st.sampled_from([16, 64]))
def test_a_block_of_tokens_holds_one_state_and_no_more_than_a_kernel_block_extra(model, tp, a):
    sizes = SIZES[model]
    block = attention_block_size(sizes, tp=tp, kernel_block=a)
    state, token = state_bytes(sizes, tp=tp), token_bytes(sizes, tp=tp)
    assert block % a == 0
    assert (block - a) * token < state <= block * token


def test_an_fp8_cache_takes_half_the_bytes():
    plain, cached = figures("27B"), figures("27B", fp8=[CACHE])
    assert cached.kv_bytes_per_token * 2 == plain.kv_bytes_per_token


def test_what_inspect_prints_is_json_with_the_promised_keys():
    found = json.loads(json.dumps(figures("35B", fp8=[WEIGHTS]).as_dict()))
    assert found["attention_block_size"] == {"bf16": 1056, "fp8": 2096}
    assert found["attention_block_size_flashinfer_gdn"] == {"bf16": 1088, "fp8": 2112}
    assert found["max_tensor_parallel"] == found["max_tensor_parallel_fp8_block"] == 4
    assert {"kv_bytes_per_token", "state_bytes_per_sequence"} <= set(found)
    assert "compare with vLLM's log" in found["note"]


@pytest.mark.parametrize("tp", [0, -1, 3, 16])
def test_ranks_that_cannot_share_the_heads_are_refused(tp):
    with pytest.raises(ValueError, match="NH 24, NKV 4, NK 16, NV 48"):
        figures("27B", tp=tp)
