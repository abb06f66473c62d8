"""Tiny models, run by hand: what the tests of the runtime share."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.text.tokens import DEFAULT_TEXT
from runtime.load import load_model
from runtime.model import draft_stream, final_norm, hidden_states, logits
from runtime.serve.engine import Engine
from runtime.serve.request import Request
from runtime.state import Batch, Pools, Room, Span, State
from runtime.weights import Model
from tests.checkpoints import hub_config, make_weights, write_checkpoint

# both kinds, and a layer after attention: state, history and cache all matter, tests stay fast
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
KINDS = ["linear_attention", "full_attention", "linear_attention"]
SHORT = {"num_hidden_layers": 3, "layer_types": KINDS}
NANO = Path(__file__).parents[1] / "data" / "nano-dense"


def write(
    folder: Path, *, moe: bool = False, ratio: int = 3, seed: int = 35, **changes: Any
) -> Path:
    """Write a short hub checkpoint with `ratio` value heads per key head, vision and MTP."""
    options = {"sizes": "ragged", "linear_num_value_heads": 2 * ratio, **SHORT, **changes}
    config = hub_config(moe=moe, **options)
    return write_checkpoint(folder, config, make_weights(config, seed=seed))


def load(
    folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any
) -> Model:
    """Load a model."""
    return load_model(open_checkpoint(folder), device, dtype, **options)


def draft_logits(model: Model, pools: Pools, batch: Batch, hidden_TH: torch.Tensor) -> torch.Tensor:
    """Return the MTP head's logits [T, V], row by row."""
    assert model.mtp is not None
    rows = [torch.tensor([row]) for row in range(len(hidden_TH))]
    stream = [draft_stream(model, pools, batch, hidden_TH, row_1=row) for row in rows]
    return logits(model, final_norm(torch.cat(stream), None, model.mtp.norm, model.config.eps))


def transformers_logits(
    folder: Path, ids: Sequence[int], dtype: torch.dtype = torch.float32, attention: str = "sdpa"
) -> torch.Tensor:
    """Return what transformers makes of one sequence, from the same folder."""
    moe = open_checkpoint(folder).config.moe
    kind = Qwen3_5MoeForCausalLM if moe else Qwen3_5ForCausalLM
    model = kind.from_pretrained(folder, dtype=dtype, attn_implementation=attention).eval()
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0]


def some_ids(count: int, model: Model, seed: int = 1) -> list[int]:
    """Return random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.sizes["V"], (count,), generator=generator).tolist()


def text_ids(folder: Path, count: int) -> list[int]:
    """Return the first tokens of the bundled text, which the bundled model has not seen."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.encode(DEFAULT_TEXT.read_text(encoding="utf-8")).ids[:count]


def pools_for(model: Model, slots: int = 2, **more: int) -> State:
    """Return state pools that fit the model."""
    room = Room(slots, 512, **more)
    return State.allocate(model.config, room, device=model.device, dtype=model.dtype)


@torch.no_grad()
def run(model: Model, ids: Sequence[int], state: State, *, slot=0, cuts=(), decode=0):
    """Return logits [T, V]: prefilled in parts that end at `cuts`, the last `decode` by steps."""
    pools, parts = state.pools(), []
    bounds = [0, *cuts, len(ids) - decode]
    for start, stop in pairwise(bounds):
        if start < stop:
            span = Span(ids[start:stop], start, slot, slot)
            parts.append(hidden_states(model, pools, Batch.pack([], [span], model.device)))
    for at in range(len(ids) - decode, len(ids)):
        span = Span(ids[at : at + 1], at, slot, slot)
        parts.append(hidden_states(model, pools, Batch.pack([span], [], model.device)))
    return logits(model, torch.cat(parts))


def served(engine: Engine, requests: Sequence[Request], waits: Sequence[int]) -> list[list[int]]:
    """Run requests that arrive one after another; return what each was delivered."""
    delivered: dict[int, list[int]] = {id(request): [] for request in requests}
    queue = list(zip(waits, requests, strict=True))
    clock = 0
    while queue or engine.busy:
        while queue and queue[0][0] <= clock:
            engine.add(queue.pop(0)[1])
            clock = 0
        for request, token in engine.step():
            delivered[id(request)].append(token)
        clock += 1
    return [delivered[id(request)] for request in requests]


def full(model: Model, ids: Sequence[int]) -> torch.Tensor:
    """Return logits [T, V] of one prefill."""
    return run(model, ids, pools_for(model, slots=1))


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest value."""
    got, expected = got.double(), expected.double()
    return ((got - expected).abs().max() / expected.abs().max()).item()


def mean_kl(p_logits: torch.Tensor, q_logits: torch.Tensor) -> float:
    """Return the mean over tokens of KL(p || q)."""
    p, q = p_logits.double().log_softmax(-1), q_logits.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def state_of(state: State, slot: int, length: int) -> list[torch.Tensor]:
    """Return all that is kept of a sequence of this length."""
    return [
        state.recurrent[slot],
        state.conv[slot],
        state.keys[:, slot, :length],
        state.values[:, slot, :length],
    ]
