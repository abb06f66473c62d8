from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from formats.family.rope import read_rope
from runtime.kernels.attention.rope import (
    qk_norm_rope_reference,
    rope_cos_sin,
    rope_cos_sin_reference,
    rope_reference,
)

EPS, THETA, RD, HEAD = 1e-6, 1e7, 64, 256
SECTIONS = (11, 11, 10)
# Two products and a sum, or a norm before them: a few units of 2^-24.
FLOAT32 = 1e-6


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distance(got, expected):
    return ((got.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def transformers_cos_sin(positions_3T, dtype=torch.float32, **scaled):
    config = Qwen3_5TextConfig(
        hidden_size=64,
        head_dim=HEAD,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": THETA,
            "partial_rotary_factor": 0.25,
            "mrope_section": list(SECTIONS),
            "mrope_interleaved": True,
            **scaled,
        },
    )
    module = qwen.Qwen3_5TextRotaryEmbedding(config)
    cos, sin = module(torch.empty(0, dtype=dtype), positions_3T[:, None])
    return cos[0], sin[0]


def positions_3T(num_tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5000, (3, num_tokens), generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_angles_of_text_and_images_are_those_of_transformers(dtype):
    for positions in (torch.arange(90).expand(3, -1).contiguous(), positions_3T(33)):
        cos, sin = rope_cos_sin(positions, RD, THETA, SECTIONS, dtype)
        expected_cos, expected_sin = transformers_cos_sin(positions, dtype)
        assert torch.equal(cos, expected_cos[:, : RD // 2])
        assert torch.equal(sin, expected_sin[:, : RD // 2])


SCALED = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "long": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144},
    "attention": {
        "rope_type": "yarn",
        "factor": 8,
        "original_max_position_embeddings": 100,
        "attention_factor": 1.7,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "no-ramp": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 6},
}


def scaling_of(scaled):
    """Return what is read of the block that transformers gets."""
    block = {"rope_theta": THETA, "partial_rotary_factor": 0.25, **scaled}
    return read_rope({"rope_parameters": block}, "").scaling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SCALED)
def test_scaled_angles_are_those_of_transformers_to_the_bit(name, dtype):
    for positions in (torch.arange(90).expand(3, -1).contiguous(), positions_3T(33)):
        expected = transformers_cos_sin(positions, dtype, **SCALED[name])
        got = rope_cos_sin(positions, RD, THETA, SECTIONS, dtype, scaling_of(SCALED[name]))
        for ours, theirs in zip(got, expected, strict=True):
            assert torch.equal(ours, theirs[:, : RD // 2])


def test_text_needs_no_sections():
    plain = rope_cos_sin(torch.arange(40), RD, THETA)
    three = rope_cos_sin(torch.arange(40).expand(3, -1), RD, THETA, SECTIONS)
    assert torch.equal(plain[0], three[0])
    assert torch.equal(plain[1], three[1])


def test_frequencies_are_dealt_out_to_time_height_and_width_in_turn():
    """One axis at a time is moved: 11 frequencies turn with height, 10 with width, 11 with time."""
    moved = []
    for axis in range(3):
        positions = torch.zeros(3, 1, dtype=torch.int64)
        positions[axis] = 1
        _, sin = rope_cos_sin(positions, RD, THETA, SECTIONS)
        moved.append(sin[0].nonzero().flatten().tolist())
    assert moved == [list(range(0, 32, 3)), list(range(1, 32, 3)), list(range(2, 30, 3))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rotation_is_that_of_transformers_to_the_bit(dtype):
    positions = positions_3T(9)
    q, k = normal(9, 3, HEAD, dtype=dtype), normal(9, 2, HEAD, seed=1, dtype=dtype)
    got = rope_reference(q, k, *rope_cos_sin(positions, RD, THETA, SECTIONS, dtype))
    angles = transformers_cos_sin(positions, dtype)
    expected = qwen.apply_rotary_pos_emb(q, k, *angles)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotation_are_those_of_transformers_to_the_bit(dtype):
    q_gate, k = normal(5, 3, 2 * HEAD, dtype=dtype), normal(5, 2, HEAD, seed=1, dtype=dtype)
    q = q_gate[..., :HEAD]
    norms = [qwen.Qwen3_5RMSNorm(HEAD, eps=EPS) for _ in range(2)]
    for seed, norm in enumerate(norms):
        norm.weight.data = normal(HEAD, seed=seed + 2, dtype=dtype)
    angles = transformers_cos_sin(torch.arange(5).expand(3, -1), dtype)
    expected = qwen.apply_rotary_pos_emb(norms[0](q), norms[1](k), *angles)
    half = (x[:, : RD // 2].contiguous() for x in angles)
    got = qk_norm_rope_reference(q, k, norms[0].weight.data, norms[1].weight.data, *half, EPS)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@given(shift=st.integers(0, 500), seed=st.integers(0, 99))
def test_a_product_depends_on_the_distance_alone(shift, seed):
    """Angles up to 510 are off by half a step of float32, 2^-16, in radians."""
    q, k = normal(2, 1, RD, seed=seed), normal(2, 1, RD, seed=seed + 1)

    def product(positions):
        q_, k_ = rope_reference(q, k, *rope_cos_sin(positions, RD, THETA))
        return q_[1, 0] @ k_[0, 0]

    apart = product(torch.tensor([3, 10]) + shift) - product(torch.tensor([3, 10]))
    assert apart.abs() <= 4 * 2**-16 * q[1].norm() * k[0].norm()


def test_a_wrong_base_or_wrong_pairs_are_seen():
    positions = torch.arange(50)
    q, k = normal(50, 2, HEAD), normal(50, 1, HEAD, seed=1)
    cos, sin = rope_cos_sin(positions, RD, THETA)
    right = rope_reference(q, k, cos, sin)[0]
    over_head = 1.0 / THETA ** (torch.arange(0, RD, 2).float() / HEAD)
    angle = positions[:, None].float() * over_head
    assert distance(rope_reference(q, k, angle.cos(), angle.sin())[0], right) > 0.1
    even, odd = q[..., :RD:2], q[..., 1:RD:2]
    side_by_side = q.clone()
    side_by_side[..., :RD:2] = even * cos[:, None] - odd * sin[:, None]
    side_by_side[..., 1:RD:2] = odd * cos[:, None] + even * sin[:, None]
    assert distance(side_by_side, right) > 0.1


@pytest.mark.parametrize("num_tokens", [1, 5, 33])
@pytest.mark.parametrize("scaled", [None, "linear", "yarn"])
@pytest.mark.usefixtures("interpreter")
def test_the_angle_kernel_agrees_with_its_reference(num_tokens, scaled):
    more = torch.float32, scaling_of(SCALED[scaled]) if scaled else None
    for positions, sections in (
        (torch.arange(num_tokens) + 1, None),
        (positions_3T(num_tokens), (3, 2, 1)),
    ):
        got = rope_cos_sin(positions, 12, 1e4, sections, *more)
        expected = rope_cos_sin_reference(positions, 12, 1e4, sections, *more)
        assert distance(got[0], expected[0]) < FLOAT32
        assert distance(got[1], expected[1]) < FLOAT32
