"""The delta rule of one layer, timed by itself beside flash-linear-attention's where it is there.

Shapes are those of the released models: 16 key heads, 128 numbers each, states in float32. Inputs
are views on one packed tensor, as the convolution leaves them. The peer gets its gates computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.device_time import copy_bandwidth, eager, timed
from benchmarks.models import CONFIGS
from runtime.floors import CHUNK, Card
from runtime.kernels.delta_rule.rule import recurrence
from runtime.kernels.delta_rule.states import (
    gated_delta_prefill,
    gated_delta_prefill_reference,
    gated_delta_step,
    gated_delta_step_reference,
)
from runtime.timing import alone

PROMPTS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 8, 64, 128)
# bfloat16 outputs of a chunk of 64 in float16 and bfloat16 products
ALLOWED = 0.01


@dataclass(frozen=True)
class Rule:
    """Inputs of some tokens: q, k, v, a, b, A_log, dt_bias."""

    inputs: tuple[Tensor, ...]
    heads: int

    @staticmethod
    def of(tokens: int, heads: int) -> Rule:
        """Return random ones, decays from almost none to almost all."""
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        packed = torch.randn(tokens, (32 + heads) * 128, **options)
        q, k, v = packed.split([16 * 128, 16 * 128, heads * 128], 1)
        qkv = q.unflatten(1, (16, 128)), k.unflatten(1, (16, 128)), v.unflatten(1, (heads, 128))
        a, b = torch.randn(tokens, 2 * heads, **options).chunk(2, 1)
        A_log = torch.empty(heads, device="cuda").uniform_(0.01, 2).log()
        return Rule((*qkv, a, b, A_log, torch.randn(heads, **options) - 1), heads)

    def states(self, count: int) -> Tensor:
        """Return random states."""
        return torch.randn(count, self.heads, 128, 128, device="cuda")

    @property
    def for_peer(self) -> dict[str, Tensor]:
        """Return what the peer takes, [tokens, heads, ...]."""
        q, k, v, a, b, A_log, dt_bias = self.inputs
        g = -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias)
        parts = {"q": q, "k": k, "v": v, "g": g, "beta": b.sigmoid()}
        return {name: x.contiguous() for name, x in parts.items()}


def measure_rule(name: str, card: Card, options: Any) -> Iterator[dict[str, Any]]:
    """Yield the lines of a model's heads."""
    heads = CONFIGS[name.rsplit("-", 1)[0]]().sizes["NV"]
    if not {"gdn_prefill", "gdn_decode"} & set(options.only):
        return
    error = max(prefill_error(heads), step_error(heads))
    yield {"what": "check", "model": name, "heads": f"16/{heads}", "passed": error < ALLOWED,
           "error": error, "allowed": ALLOWED}  # fmt: skip
    if options.check_only or error >= ALLOWED:
        return
    told = {"model": name, "heads": f"16/{heads}"}
    with alone(options.lock):
        yield from timed_rule(heads, told, card, options)


def timed_rule(
    heads: int, told: dict[str, Any], card: Card, options: Any
) -> Iterator[dict[str, Any]]:
    """Yield the lines of a rule that has passed its check."""
    for tokens in PROMPTS if "gdn_prefill" in options.only else ():
        line = told | {"batch": 1, "tokens": tokens} | prefill(heads, tokens, card)
        yield {"what": "gdn_prefill"} | line
    for batch in BATCHES if "gdn_decode" in options.only else ():
        yield {"what": "gdn_decode"} | told | {"batch": batch} | step(heads, batch, card)


def prefill_error(heads: int) -> float:
    """Return the relative error, of outputs and states, of three sequences in float64."""
    rule, slots = Rule.of(700, heads), torch.tensor([2, 0, 1], device="cuda")
    bounds = torch.tensor([0, 130, 131, 700], device="cuda")
    pool = rule.states(3)
    exact_pool = pool.double()
    o = gated_delta_prefill(*rule.inputs, pool, slots, bounds)
    exact = gated_delta_prefill_reference(
        *(x.double() for x in rule.inputs), exact_pool, slots, bounds, rule=recurrence
    )
    return max(relative(o, exact), relative(pool, exact_pool))


def step_error(heads: int) -> float:
    """Return the relative error of one token of three sequences in float64."""
    rule, slots = Rule.of(3, heads), torch.tensor([2, 0, 1], device="cuda")
    pool = rule.states(3)
    exact_pool = pool.double()
    o = gated_delta_step(*rule.inputs, pool, slots)
    exact = gated_delta_step_reference(*(x.double() for x in rule.inputs), exact_pool, slots)
    return max(relative(o, exact), relative(pool, exact_pool))


def relative(got: Tensor, expected: Tensor) -> float:
    """Return the relative error."""
    return float((got.double() - expected).norm() / expected.norm())


def prefill(heads: int, tokens: int, card: Card) -> dict[str, Any]:
    """Return the times of one prompt."""
    rule = Rule.of(tokens, heads)
    pool, slots = rule.states(1), torch.tensor([0], device="cuda")
    bounds = torch.tensor([0, tokens], device="cuda")
    moved = tokens * ((32 + 2 * heads) * 128 + 2 * heads) * 2 + 2 * heads * 128**2 * 4
    flops = tokens * heads * (6 * 128**2 + 8 * CHUNK * 128 + 2 * CHUNK**2 / 3)
    floor = max(moved / card.bandwidth, flops / card.bf16_rate) * 1e3
    found = times(partial(gated_delta_prefill, *rule.inputs, pool, slots, bounds), floor)
    given = {key: x[None] for key, x in rule.for_peer.items()}
    return found | peer("chunk_gated_delta_rule", given, rule.states(1))


def step(heads: int, batch: int, card: Card) -> dict[str, Any]:
    """Return the times of one token of each sequence."""
    rule = Rule.of(batch, heads)
    pool, slots = rule.states(batch), torch.arange(batch, device="cuda")
    moved = batch * (2 * heads * 128**2 * 4 + ((32 + 2 * heads) * 128 + 2 * heads) * 2)
    call = partial(gated_delta_step, *rule.inputs, pool, slots)
    found = times(call, moved / card.bandwidth * 1e3)
    rate = moved / found["ms"] / 1e6
    found["fraction_of_copy_bandwidth"] = rate / copy_bandwidth("cuda")
    given = {key: x[:, None] for key, x in rule.for_peer.items()}
    return found | peer("fused_recurrent_gated_delta_rule", given, rule.states(batch))


def times(call: Callable[[], Any], floor: float) -> dict[str, Any]:
    """Return the times of a call beside its floor."""
    ms = timed(call, "cuda")["ms"]
    found = {"ms": ms, "eager_ms": eager(call), "floor_ms": floor}
    return found | {"fraction_of_floor": floor / ms}


def peer(name: str, given: dict[str, Tensor], states: Tensor) -> dict[str, Any]:
    """Return the time that flash-linear-attention takes, if it is installed."""
    if find_spec("fla") is None:
        return {"peer_ms": None}
    function = getattr(import_module("fla.ops.gated_delta_rule"), name)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    with torch.inference_mode():
        found = timed(partial(function, **given, initial_state=states, **options), "cuda")
    return {"peer_ms": found["ms"], "peer": f"flash-linear-attention, {found['timed']}"}
