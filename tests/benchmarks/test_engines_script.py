"""What can be tested of it without vLLM: how its answers and its logs are read."""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace

import pytest
import torch

from qwen35_convert import api
from qwen35_convert.containers.registry import open_checkpoint

LOG = """
INFO 07-25 02:09:00 [__init__.py:978] Using MarlinNvFp4LinearKernel for NVFP4 GEMM
INFO 07-25 02:09:00 [nvfp4.py:300] Using 'MARLIN' NvFp4 MoE backend out of potential backends.
INFO 07-25 02:09:01 [__init__.py:978] Using MarlinNvFp4LinearKernel for NVFP4 GEMM
INFO 07-25 02:09:01 [cache.py:1] Using cache of 2 GB
Traceback (most recent call last):
ValueError: the first
torch.OutOfMemoryError: the last
shutting down
"""


@pytest.fixture
def script():
    return importlib.import_module("benchmarks.engines")


def test_what_vllm_chose_is_kept_once_in_its_own_words(script):
    assert script.kernels(LOG) == [
        "Using MarlinNvFp4LinearKernel for NVFP4 GEMM",
        "Using 'MARLIN' NvFp4 MoE backend out of potential backends.",
    ]


@pytest.mark.parametrize(
    ("log", "said"),
    [(LOG, "OutOfMemoryError: the last"), ("Killed\n", "Killed"), ("", "nothing was said")],
)
def test_the_last_error_of_a_log(script, log, said):
    assert script.last_error(log) == said


def test_perplexity_leaves_out_first_tokens_only():
    perplexity = importlib.import_module("benchmarks.engines_vllm").perplexity
    half = SimpleNamespace(logprob=math.log(0.5))
    rows, scores = [[7, 8, 9], [1, 2]], [[None, {8: half}, {9: half, 3: None}], [None, {2: half}]]
    assert perplexity(rows, scores) == pytest.approx(2.0)
    with pytest.raises(AssertionError, match="has no log-probability"):
        perplexity(rows, [[None, None, {9: half}], [None, {2: half}]])


def test_the_scales_that_vllm_has_are_held_against_the_artifact_s(script):
    ours = {"layers.3.self_attn": [0.0173, 0.004]}
    assert script.scales_of({}, {}) == {}
    assert script.scales_of(dict(ours), ours) == {"kv_cache": "fp8", "scales_loaded": True}
    at_one = {"layers.3.self_attn": [1.0, 1.0]}
    found = script.scales_of(at_one, ours)
    assert found == {"kv_cache": "fp8", "scales_loaded": False, "scales": at_one}
    assert not script.scales_of({}, ours)["scales_loaded"]


def test_scales_are_found_in_vllms_model_by_attention():
    read = importlib.import_module("benchmarks.engines_vllm").cache_scales
    attention = torch.nn.Module()
    attention._k_scale, attention._v_scale = torch.tensor(0.5), torch.tensor(0.25)
    names = {"language_model.model.layers.3.self_attn.attn": attention}
    names["visual.blocks.0.attn"] = names["language_model.model.layers.3.mlp"] = torch.nn.Module()
    model = SimpleNamespace(named_modules=names.items)
    assert read(model) == {"layers.3.self_attn": [0.5, 0.25]}


def test_an_artifact_says_which_cache_it_asks_for(tmp_path, nano):
    ours = importlib.import_module("benchmarks.engines_ours")
    changes = ["quantize.kv_cache=fp8", "quantize.calibrate.tokens=512"]
    api.convert(nano, tmp_path / "out", "fp8-block", overrides=changes)
    assert (ours.cache_of(nano), ours.cache_of(tmp_path / "out")) == ("auto", "fp8")
    scales = ours.cache_scales_of(open_checkpoint(tmp_path / "out"))
    assert list(scales) == ["layers.3.self_attn"]
    assert all(scale > 0 for scale in scales["layers.3.self_attn"])


def test_a_line_says_how_far_the_two_agree(script):
    ours = {"ppl_ours": 20.0, "tokens_ours": [list(range(32)), list(range(32))]}
    theirs = {"loads": True, "ppl": 20.09, "tokens": [list(range(32)), [0, 1, 7, *range(29)]]}
    line = script.line_of(theirs, ours)
    assert line["passed"]
    assert (line["greedy_equal"], line["prompts"], line["greedy_common"]) == (1, 2, [32, 2])
    assert not script.line_of(theirs | {"ppl": 20.11}, ours)["passed"]
    assert not script.line_of({"loads": False, "error": "refused"}, ours)["passed"]
