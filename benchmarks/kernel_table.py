"""What `benchmarks.kernels` checks and times: each kernel, the models of its sizes, its shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.cases import elementwise, mixers, products
from benchmarks.cases.setting import Case

ALL = ("0.8B", "27B", "35B-A3B")
RAGGED = (1, 63, 0, 64, 65, 1000, 4099)
LONG = ((8192,), RAGGED, (130,), (1,))


@dataclass(frozen=True)
class Row:
    """A kernel, the models whose sizes it is run at, and its shapes."""

    kernel: str
    build: Callable[..., Case]
    models: tuple[str, ...]
    shapes: tuple[dict[str, Any], ...]
    tiny: dict[str, Any] | None


def over(name: str, values: Sequence[Any], **fixed: Any) -> tuple[dict[str, Any], ...]:
    """Return shapes that differ in one value."""
    return tuple({name: value, **fixed} for value in values)


def layers(scheme: str, rows: Sequence[int], sizes: Sequence[tuple[int, int]]) -> Any:
    """Return shapes of linear layers with these rows and (outputs, inputs)."""
    return tuple({"m": m, "n": n, "k": k, "scheme": scheme} for n, k in sizes for m in rows)


BATCHES = (1, 8, 64)
TOKENS = (1, 64, 8192)
ROWS = (1, 4, 16, 17, 512, 4096)
WIDE, DOWN, SMALL, MOE_IN, ODD = (
    (34816, 5120),
    (5120, 17408),
    (7168, 1024),
    (12288, 2048),
    (1100, 1001),
)
STEPS = over("batch", BATCHES, state=torch.float32) + over("batch", (64,), state=torch.bfloat16)
CHUNKED = ({"lengths": (5000, 65, 1, 700), "starts": (64, 4096, 8000, 0)},)
PREFILLS = ({"lengths": (8192,), "starts": (0,)}, {"lengths": RAGGED, "starts": (0,) * 7}, *CHUNKED)
DECODES = over("lengths", ((1,), (1000,), (4096,), (8192,), (4096,) * 8, (7, 1, 64, 1000) * 16))
TINY_LENGTHS = {"lengths": (3, 0, 20, 66)}
TABLE = (
    Row("conv1d_prefill", elementwise.conv1d_prefill, ALL, over("lengths", LONG), TINY_LENGTHS),
    Row("conv1d_step", elementwise.conv1d_step, ALL, over("batch", BATCHES), {"batch": 3}),
    Row("rmsnorm", elementwise.rms_norm, ALL, over("tokens", TOKENS), {"tokens": 3}),
    Row("add_rmsnorm", elementwise.add_rms_norm, ALL, over("tokens", TOKENS), {"tokens": 3}),
    Row("gated_rmsnorm", elementwise.gated_rms_norm, ALL, over("tokens", TOKENS), {"tokens": 3}),
    Row("rope_cos_sin", elementwise.rope_cos_sin, ("0.8B",), over("tokens", TOKENS), {"tokens": 3}),
    Row("norm_rope_write", elementwise.norm_rope_write, ALL, over("tokens", TOKENS), {"tokens": 9}),
    Row("silu_mul", elementwise.silu_mul, ALL, over("tokens", (16, 4096)), {"tokens": 3}),
    Row("quantize_rows", elementwise.quantise_rows, ALL,
        over("tokens", (17, 4096), group=128) + over("tokens", (17, 4096), group=None), None),
    Row("gated_delta_step", mixers.gated_delta_step, ALL, STEPS,
        {"batch": 3, "state": torch.float32}),
    Row("gated_delta_prefill", mixers.gated_delta_prefill, ALL,
        (*over("lengths", (*LONG, (2048,) * 4)), {"lengths": (700,), "equal_keys": True}),
        TINY_LENGTHS),
    Row("attention_prefill", mixers.prefill, ALL, PREFILLS,
        {"lengths": (1, 70, 20), "starts": (40, 65, 0)}),
    Row("attention_decode", mixers.decode, ALL, DECODES, {"lengths": (100, 1, 65)}),
    Row("attention_step", mixers.step, ALL, DECODES[:-1], {"lengths": (100, 1, 65)}),
    Row("dequant", products.dequant, ("27B",),
        ({"n": 34816, "k": 5120, "scheme": "block"}, {"n": 1100, "k": 1001, "scheme": "channel"}),
        {"n": 130, "k": 140, "scheme": "block"}),
    Row("linear_fp8_block", products.linear_fp8, ("27B",), layers("block", ROWS, (WIDE, DOWN)),
        {"m": 5, "n": 70, "k": 140, "scheme": "block"}),
    Row("linear_fp8_block", products.linear_fp8, ("0.8B",), layers("block", ROWS, (SMALL,)), None),
    Row("linear_fp8_block", products.linear_fp8, ("35B-A3B",),
        layers("block", ROWS, (MOE_IN,)), None),
    Row("linear_fp8_odd", products.linear_fp8, ("0.8B",),
        layers("block", (3, 5, 33), (ODD,)) + layers("channel", (3, 5, 33), (ODD,)), None),
    Row("linear_fp8_channel", products.linear_fp8, ("27B",), layers("channel", ROWS, (WIDE,)),
        {"m": 5, "n": 70, "k": 140, "scheme": "channel"}),
    Row("linear_fp8_dynamic_block", products.linear_fp8_dynamic, ("27B",),
        layers("block", ROWS[3:], (WIDE, DOWN)), None),
    Row("linear_fp8_dynamic_block", products.linear_fp8_dynamic, ("0.8B",),
        layers("block", ROWS[3:], (SMALL,)), None),
    Row("linear_fp8_dynamic_channel", products.linear_fp8_dynamic, ("27B",),
        layers("channel", ROWS[3:], (WIDE,)), None),
    Row("gated_linear", products.gated_linear, ("0.8B", "27B"),
        over("tokens", (1, 4), scheme="block") + over("tokens", (1, 4), scheme="plain"),
        {"tokens": 3, "scheme": "block"}),
    Row("route", products.route, ("35B-A3B",),
        over("tokens", TOKENS, absorbed=False) + over("tokens", (64,), absorbed=True),
        {"tokens": 3, "absorbed": True}),
    Row("expert_blocks", products.sort_pairs, ("35B-A3B",),
        over("tokens", (64, 8192), block=128), {"tokens": 70, "block": 16}),
    Row("add_pairs_rmsnorm", products.add_pairs_norm, ("35B-A3B",),
        over("tokens", (64, 8192)), {"tokens": 3}),
    Row("moe_experts_bf16", products.moe_experts, ("35B-A3B",),
        over("tokens", (1, 4, 64, 2048), scheme="plain"), {"tokens": 9, "scheme": "plain"}),
    Row("moe_experts_fp8", products.moe_experts, ("35B-A3B",),
        over("tokens", (1, 4, 64, 2048), scheme="block"), {"tokens": 2, "scheme": "block"}),
    Row("moe_experts_fp8_dynamic", products.moe_experts, ("35B-A3B",),
        over("tokens", (64, 2048, 8192), scheme="block", dynamic=True), None),
)  # fmt: skip
