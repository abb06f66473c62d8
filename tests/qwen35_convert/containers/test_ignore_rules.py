"""Lists of modules that are not quantised, read as each engine reads them."""

import time

import pytest

from qwen35_convert.containers.safetensors.ignore_rules import (
    ENGINES,
    modelopt_leaves,
    sglang_leaves,
    transformers_leaves,
    vllm_leaves,
)

UP = "model.layers.1.mlp.up_proj"
EXPERT = "model.layers.1.mlp.experts.7.up_proj"
CASES = (
    # rule               entry                             module    left
    (vllm_leaves,         UP,                               UP,       True),
    (vllm_leaves,         "mlp.up_proj",                    UP,       False),
    (vllm_leaves,         r"re:.*\.up_proj",                UP,       True),
    (vllm_leaves,         r"re:mlp\.up_proj",               UP,       False),
    (vllm_leaves,         "model.layers.1.mlp.experts",     EXPERT,   True),
    (vllm_leaves,         "model.layers.1.mlp.experts.0.x", EXPERT,   True),
    (vllm_leaves,         r"re:.*\.up_proj",                EXPERT,   False),
    (transformers_leaves, UP,                               UP,       True),
    (transformers_leaves, UP,                               UP + "s", False),
    (transformers_leaves, "model.layers.1",                 UP,       True),
    (transformers_leaves, "model.layers.",                  UP,       True),
    (transformers_leaves, "model.layers.",                  "modelslayersx", True),
    (transformers_leaves, "model.layers.1.mlp-up_proj",     UP,       False),
    (transformers_leaves, "modelx",                         UP,       False),
    (transformers_leaves, "up_proj",                        UP,       True),
    (transformers_leaves, "proj",                           UP,       True),
    (transformers_leaves, r"model\.layers\.\d+",            UP,       True),
    (transformers_leaves, r"re:model\.layers\.\d",          UP,       True),
    (transformers_leaves, "re:model.layers.1",              UP,       True),
    (transformers_leaves, "model|mlp",                      UP,       True),
    (transformers_leaves, "mlp",                            UP,       False),
    (sglang_leaves,       "mlp",                            UP,       True),
    (sglang_leaves,       "1.mlp",                          UP,       True),
    (sglang_leaves,       "1.ml",                           UP,       False),
    (sglang_leaves,       UP,                               UP,       True),
    (sglang_leaves,       r"re:.*proj",                     UP,       True),
    (modelopt_leaves,     "layers.1.",                      UP,       True),
    (modelopt_leaves,     "*.up_proj",                      UP,       True),
    (modelopt_leaves,     "*.down_proj",                    UP,       False),
)  # fmt: skip


@pytest.mark.parametrize(("rule", "entry", "module", "left"), CASES)
def test_a_list_is_read_as_its_engine_reads_it(rule, entry, module, left):
    for others in ([], ["x.y", "re:z", r"(q)\.\d"]):
        assert rule([*others, entry])(module) == left
        assert not rule(others)(module)


def test_long_lists_of_large_models_are_read_at_once():
    entries = [f"model.layers.{i}.mlp.gate" for i in range(1000)]
    modules = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(100) for j in range(100)]
    started = time.process_time()
    for read in ENGINES.values():
        leaves = read(entries)
        assert not any(map(leaves, modules))
        assert read is vllm_leaves or all(map(leaves, entries))
    assert time.process_time() - started < 10  # name by name: minutes
