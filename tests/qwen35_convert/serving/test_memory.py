"""The memory that serving takes, derived by hand for three models, and held against what allocates.

0.8B, one layer: window 6144 x 3, state 16 x 128 x 128 in F32, a token 2 x 2 x 256 in BF16.
27B: window 10240 x 3, state 48 x 128 x 128, a token 2 x 4 x 256. 35B-A3B: 8192 x 3, 32 x 128 x 128.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qwen35_convert as q
from formats.family.config import read_config
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.serving.memory import (
    ALLOCATIONS,
    largest_batch,
    longest_context,
    memory_needed,
)
from runtime.state import Room, State
from tests import llama_cpp
from tests.checkpoints import dense

KV8 = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
ENGINES = sorted(ALLOCATIONS)


def model(layers: int, query: int, keys: int, values: int, **more):
    return read_config(
        {
            "model_type": "qwen3_5_text",
            "vocab_size": 248320,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": layers,
            "num_attention_heads": query,
            "num_key_value_heads": keys,
            "linear_num_value_heads": values,
            "max_position_embeddings": 262144,
            "rope_parameters": {"rope_theta": 10000000},
            **more,
        }
    )


SMALL, LARGE, EXPERTS = model(24, 8, 2, 16), model(64, 24, 4, 48), model(40, 16, 2, 32)
# vLLM: N, bytes of a page, pools: layers with attention; three groups of the others.
PAGES = {
    "0.8B": (SMALL, 544, 544 * 2048, 6),
    "27B": (LARGE, 784, 784 * 4096, 16),
    "35B-A3B": (EXPERTS, 1056, 1056 * 2048, 10),
}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize(("context", "batch"), [(1, 1), (4096, 1), (32768, 8)])
def test_vllm_has_pages_for_two_states_and_for_tokens(name, context, batch):
    config, block, page, pools = PAGES[name]
    blocks = -(-context // block)
    expected = pools * page * (batch * (blocks + 2 * 3) + 1)
    assert memory_needed(config, 0, context, batch, "vllm").cache == expected


def test_vllm_in_numbers():
    needed = memory_needed(SMALL, 1_746_882_752, 4096, 1, "vllm")
    assert needed.state == 40_108_032
    assert needed.token == 6 * 2048
    assert needed.cache == 8 * 6 * 1_114_112 + 40_108_032 + 6 * 1_114_112 == 100_270_080
    assert needed.total == 1_847_152_832


@pytest.mark.parametrize(
    ("config", "state", "token"),
    [
        (SMALL, 18 * (6144 * 3 * 2 + 16 * 128 * 128 * 4), 6 * 2048),
        (LARGE, 48 * (10240 * 3 * 2 + 48 * 128 * 128 * 4), 16 * 4096),
        (EXPERTS, 30 * (8192 * 3 * 2 + 32 * 128 * 128 * 4), 10 * 2048),
    ],
    ids=["0.8B", "27B", "35B-A3B"],
)
def test_sglang_has_a_state_and_tokens(config, state, token):
    needed = memory_needed(config, 7, 1000, 3, "sglang")
    assert (needed.state, needed.token) == (state, token)
    assert needed.total == 7 + 3 * (state + 1000 * token)


def test_llama_cpp_has_windows_in_f32_and_tokens_by_256():
    needed = memory_needed(SMALL, 0, 1000, 3, "llama.cpp")
    assert needed.state == 18 * (6144 * 3 * 4 + 16 * 128 * 128 * 4)
    assert needed.cache == 3 * (needed.state + 1024 * 6 * 2048)


def test_an_fp8_cache_takes_half_a_token_where_an_engine_has_it():
    cached = model(24, 8, 2, 16, quantization_config=KV8)
    assert memory_needed(cached, 0, 1, 1, "sglang").token == 6 * 1024
    assert memory_needed(cached, 0, 1, 1, "vllm").cache == 6 * 1072 * 1024 * (1 + 6 + 1)
    assert memory_needed(cached, 0, 1, 1, "llama.cpp").token == 6 * 2048


@pytest.mark.parametrize("kind", ["linear_attention", "full_attention"])
def test_layers_of_one_kind_alone_have_pools_too(kind):
    config = replace(SMALL, layer_types=(kind,) * 24)
    blocks = 2 if kind == "linear_attention" else 1
    assert memory_needed(config, 0, 544, 2, "vllm").cache == 24 * 544 * 2048 * (2 * blocks + 1)


def test_a_state_is_what_our_runtime_allocates(tmp_path):
    config = open_checkpoint(dense(tmp_path / "in")).config
    room = Room(slots=3, max_len=50)
    state = State.allocate(config, room, device=torch.device("cpu"), dtype=torch.bfloat16)
    held = [state.recurrent, state.conv, state.keys, state.values]
    assert memory_needed(config, 0, 50, 3, "sglang").cache == sum(t.nbytes for t in held)


@pytest.mark.parametrize(("batch", "context"), [(1, 512), (3, 300)])
def test_llama_cpp_allocates_what_is_told(tmp_path_factory, nano_path, batch, context):
    out = tmp_path_factory.mktemp("gguf") / "nano.gguf"
    q.convert(nano_path, out, "gguf-bf16", q.RunOptions(verify=False))
    needed = memory_needed(open_checkpoint(out).config, 0, context, batch, "llama.cpp")
    mib = sum(llama_cpp.cache_sizes(out, context * batch, batch))
    assert mib == pytest.approx(needed.cache / 2**20, abs=0.01)  # it logs two digits


@given(
    st.sampled_from([SMALL, LARGE, EXPERTS]),
    st.sampled_from(ENGINES),
    st.integers(1, 300_000),
    st.integers(1, 200),
    st.integers(1, 10**12),
)
def test_what_fits_is_the_most_that_fits(config, engine, context, batch, memory):
    def takes(context: int, batch: int) -> int:
        return memory_needed(config, 10**9, context, batch, engine).total

    longest = longest_context(config, 10**9, batch, engine, memory)
    most = largest_batch(config, 10**9, context, engine, memory)
    assert longest == 0 or takes(longest, batch) <= memory
    assert longest == 262144 or takes(longest + 1, batch) > memory
    assert most == 0 or takes(context, most) <= memory
    assert takes(context, most + 1) > memory


@pytest.mark.parametrize(("context", "batch"), [(0, 1), (1, 0), (-5, 1)])
def test_numbers_below_one_are_refused(context, batch):
    with pytest.raises(q.RecipeError, match="expected 1 or more"):
        memory_needed(SMALL, 0, context, batch, "vllm")


def test_an_engine_that_is_not_known_is_refused():
    with pytest.raises(q.RecipeError, match=r"vllm, sglang or llama\.cpp"):
        memory_needed(SMALL, 0, 1, 1, "transformers")


def test_inspect_answers_for_the_engines_that_load_it(nano):
    shown = q.inspect(nano, batch=2, memory=10**7).serving["memory"]
    assert (shown["context"], shown["batch"], shown["memory_bytes"]) == (4096, 2, 10**7)
    assert set(shown["engines"]) == {"vllm", "sglang"}
    vllm = shown["engines"]["vllm"]
    assert vllm["fits"] == (vllm["total_bytes"] <= 10**7)
    assert vllm["total_bytes"] == vllm["weight_bytes"] + vllm["cache_bytes"]
    assert vllm["longest_context"] < 4096
    assert "memory" not in q.inspect(nano).serving
