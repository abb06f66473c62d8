"""What `hopper` checks of a model before it is timed: its kernels beside float32 references.

Two layers, one of each kind, take prompts, then single tokens. For each prompt other kernels are
chosen: two sequences of few rows; products, experts and attention whose warps have roles; a rule
that walks in two halves, and four-bit experts that are decoded first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.models import CONFIGS, random_model
from runtime.kernels import launch
from runtime.kernels.launch import interpreting
from runtime.kernels.linear.packed import PackedWeight, unpacked_reference
from runtime.kernels.linear.weight import Fp8Weight
from runtime.kernels.moe import layer, packed_row
from runtime.kernels.moe.packed_row import routed_inner
from runtime.kernels.moe.routing import route_absorbed
from runtime.model import hidden_states, logits
from runtime.state import Batch, Room, Span, State
from runtime.weights import Model

PROMPTS = ((2, 20), (1, 512), (1, 4096))  # sequences, and tokens of each
PACKED = ("nvfp4", "int4")


def in_float32(value: Any) -> Any:
    """Return the same in float32; FP8 weights keep their codes."""
    if isinstance(value, Fp8Weight):
        return value
    if isinstance(value, PackedWeight):
        return unpacked_reference(value)
    if isinstance(value, Tensor):
        return value.float()
    if isinstance(value, tuple):
        return tuple(in_float32(x) for x in value)
    if hasattr(value, "__dataclass_fields__") and not hasattr(value, "layer_types"):
        names = value.__dataclass_fields__
        return replace(value, **{name: in_float32(getattr(value, name)) for name in names})
    return value


@torch.inference_mode()
def answers(model: Model, prompts: Tensor, steps: Tensor) -> list[Tensor]:
    """Return hidden states: of one or two prompts, then of single tokens of one or both."""
    sequences, end = prompts.shape
    room = Room(sequences, end + len(steps) + 1)
    state = State.allocate(model.config, room, device=model.device, dtype=model.dtype)
    pools = state.pools()
    spans = [Span(ids, 0, slot, slot) for slot, ids in enumerate(prompts.tolist())]
    outputs = [hidden_states(model, pools, Batch.pack([], spans, model.device))]
    for i, token in enumerate(steps.tolist()):
        rows = [Span([token], end + i, 0, 0)]
        if i % 2 and sequences > 1:  # the second sequence goes half as fast
            rows.append(Span([token], end + i // 2, 1, 1))
        outputs.append(hidden_states(model, pools, Batch.pack(rows, [], model.device)))
    return [x.float().cpu() for x in outputs]


def check(name: str, device: str, dtype: torch.dtype, *, stored: str) -> dict[str, Any]:
    """Compare two layers, and the head, with float32; return the errors of the worst prompt.

    A dozen roundings to bfloat16 of 2^-9 each come to less than 0.01. Quantised inputs may cost a
    tenth more than they cost the reference: codes next to a tie go one way or the other. So do
    experts: where the kernels are given their choice, float32 is given the same one.
    """
    model = random_model(CONFIGS[name](), device, dtype, stored=stored, layers=2)
    # on a CPU: more than 16 rows would be quantised, which the interpreter does otherwise
    sizes = PROMPTS if device == "cuda" else ((2, 7),)
    found = [prompt_errors(model, *size, stored=stored) for size in sizes]
    worst = max(found, key=lambda errors: errors["error"] / errors["allowed"])
    head = max(errors["head_error"] for errors in found)
    passed = worst["error"] < worst["allowed"] and head < 0.005
    return {"passed": passed, **worst, "head_error": head}


def prompt_errors(model: Model, sequences: int, tokens: int, *, stored: str) -> dict[str, float]:
    """Return the errors after prompts of so many tokens, and what is allowed."""
    vocabulary, device = model.config.sizes["V"], model.device.type
    prompts = torch.randint(vocabulary, (sequences, tokens))
    steps = torch.randint(vocabulary, (2 if device == "cuda" else 1,))
    choices: list[Tensor] = []
    with running(device), recorded(choices):
        got = answers(model, prompts, steps)
    wide = in_float32(model)
    undynamic = replace(wide, layers=tuple(_undynamic(x) for x in wide.layers))
    with reference(), repeated(choices) if stored in PACKED else nullcontext():
        exact = answers(undynamic, prompts, steps)
    error, allowed = distance(got, exact), 0.01
    if stored == "fp8":
        with reference():
            allowed += 1.1 * distance(answers(wide, prompts, steps), exact)
    rows = torch.randint(vocabulary, (64,), device=model.device)
    hidden = got[1].to(model.device, model.dtype)
    scores = hidden.double() @ model.head[rows].double().T
    with running(device):
        head = distance([logits(model, hidden)[:, rows]], [scores])
    return {"tokens": tokens, "error": error, "allowed": allowed, "head_error": head}


@contextmanager
def reference() -> Iterator[None]:
    """Run references, also on a GPU, and in whole float32."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(launch, "HAS_TRITON", new=False))
        stack.enter_context(torch.backends.cudnn.flags(allow_tf32=False))
        yield


def distance(got: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the relative error of all outputs together."""
    a, b = torch.cat(list(got)).double(), torch.cat(list(expected)).double()
    return float((a - b).norm() / b.norm())


@contextmanager
def recorded(choices: list[Tensor]) -> Iterator[None]:
    """Keep which experts are chosen, call by call: kernels that choose for themselves choose alike.

    Those of FP8 are not seen.
    """

    def record(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        weights, experts = route_absorbed(logits, k)
        choices.append(experts)
        return weights, experts

    def inner(x_1H: Tensor, gate_up: PackedWeight, logits: Tensor, k: int) -> Tensor:
        record(logits, k)
        return routed_inner(x_1H, gate_up, logits, k)

    with (
        patch.object(layer, "route_absorbed", record),
        patch.object(packed_row, "routed_inner", inner),
    ):
        yield


@contextmanager
def repeated(choices: Sequence[Tensor]) -> Iterator[None]:
    """Choose the experts that were recorded, with this run's own weights for them."""
    left = iter(choices)

    def repeat(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
        experts = next(left)
        assert experts.shape == (len(logits), k + 1), "a call was not recorded"
        routed = logits[:, :-1].gather(1, experts[:, :-1]).softmax(dim=1)
        return torch.cat([routed, torch.sigmoid(logits[:, -1:])], dim=1), experts

    with patch.object(layer, "route_absorbed", repeat):
        yield
    assert next(left, None) is None, "float32 made fewer calls"


def _undynamic(value: Any) -> Any:
    """Return the same with FP8 weights that leave their inputs as they are."""
    if isinstance(value, Fp8Weight):
        return replace(value, dynamic=False)
    if hasattr(value, "__dataclass_fields__"):
        names = value.__dataclass_fields__
        return replace(value, **{name: _undynamic(getattr(value, name)) for name in names})
    return value


def running(device: str) -> AbstractContextManager[None]:
    """Return what kernels run within."""
    return nullcontext() if device == "cuda" else interpreting()
