"""What other tools leave in a checkpoint is refused by name, with who wrote it."""

from __future__ import annotations

import pytest

from formats.family.leftovers import TASK_HEADS, leftover
from formats.family.names import HUB, place
from formats.family.rules import RULES
from formats.tensor import TensorInfo

HUB_NAMES = [rule.hub.replace("{i}", "3").replace("{e}", "17") for rule in RULES.values()]


def info(name: str, dtype: str = "BF16", shape: tuple[int, ...] = (4, 4)) -> TensorInfo:
    return TensorInfo(name, dtype, shape)


@pytest.mark.parametrize(
    ("name", "writer"),
    [
        ("model.layers.3.self_attn.q_proj.qweight", "GPTQ or AWQ"),
        ("model.layers.3.self_attn.q_proj.qzeros", "GPTQ or AWQ"),
        ("model.layers.3.self_attn.q_proj.g_idx", "GPTQ"),
        ("model.layers.3.self_attn.q_proj.scales", "GPTQ, AWQ or MLX"),
        ("language_model.model.layers.3.self_attn.q_proj.biases", "MLX"),
        ("model.layers.3.self_attn.q_proj.weight.absmax", "bitsandbytes"),
        ("model.layers.3.self_attn.q_proj.weight.quant_map", "bitsandbytes"),
        ("model.layers.3.self_attn.q_proj.weight.nested_absmax", "bitsandbytes"),
        ("model.layers.3.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4", "bitsandbytes"),
        ("model.layers.3.self_attn.q_proj.SCB", "bitsandbytes"),
        ("model.layers.3.self_attn.q_proj.weight_packed", "compressed-tensors 4-bit"),
        ("model.layers.3.mlp.experts.gate_up_proj_packed", "compressed-tensors 4-bit"),
        ("model.layers.3.self_attn.q_proj.weight_zero_point", "compressed-tensors"),
        ("model.layers.3.self_attn.q_proj.weight_scale_2", "NVFP4"),
    ],
)
def test_what_another_tool_left_is_refused_with_its_writer(name, writer):
    problem = leftover(info(name, "F32"))
    assert problem is not None
    assert (problem.tensor, problem.problem) == (name, f"was written by {writer}")
    assert "unquantised checkpoint" in problem.remedy


@pytest.mark.parametrize(
    "rest",
    [
        "self_attn.q_proj.lora_A.weight",
        "self_attn.q_proj.lora_B.default.weight",
        "self_attn.q_proj.lora_magnitude_vector.default.weight",
        "self_attn.q_proj.lora_a",
        "mlp.down_proj.hada_w1_a",
        "mlp.modules_to_save.default.gate_proj.weight",
        "mlp.original_module.gate_proj.weight",
    ],
)
def test_a_tensor_of_an_adapter_is_to_be_merged_first(rest):
    problem = leftover(info(f"base_model.model.model.layers.3.{rest}", "F32"))
    assert problem is not None
    assert "adapter" in problem.problem
    assert "merge" in problem.remedy


@pytest.mark.parametrize("last", ["_flat_param", "flat_param"])
def test_a_rank_s_share_of_fsdp_is_refused_as_one(last):
    problem = leftover(info(f"model.layers.0._fsdp_wrapped_module.{last}", "BF16", (4096,)))
    assert problem is not None
    assert "FSDP" in problem.problem
    assert "FULL_STATE_DICT" in problem.remedy


@pytest.mark.parametrize("head", TASK_HEADS)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_task_head_is_refused_as_one(prefix, head):
    problem = leftover(info(f"{prefix}{head}.weight"))
    assert problem is not None
    assert "task head" in problem.problem


@pytest.mark.parametrize("dtype", ["U8", "I8", "I32", "U32"])
def test_a_packed_weight_is_refused_with_its_shape(dtype):
    """bitsandbytes stores a 4-bit matrix as one column of bytes."""
    problem = leftover(info("model.layers.0.linear_attn.in_proj_a.weight", dtype, (65536, 1)))
    assert problem is not None
    assert problem.problem == f"is packed {dtype} with shape [65536, 1]"


@pytest.mark.parametrize("hub", HUB_NAMES)
def test_no_tensor_of_the_family_is_a_leftover(hub):
    assert leftover(info(place(hub, HUB))) is None
    assert leftover(info(place(hub, HUB) + "_scale_inv")) is None
