"""Faults in the scales of an FP8 cache, and in the config that asks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tests.planted.edit import Entry, Tensors
from tests.planted.fault import BOTH, FORGED, STRUCTURE, Fault, in_outputs
from tests.planted.quantization_faults import Change, block_fault, put
from tests.planted.tensor_fault import Plant, tensor_fault

KIND = "scales of a cache"
KEY, VALUE = "k_scale", "v_scale"
SCHEME = "kv_cache_scheme"
WHERE = in_outputs("fp8-block-kv8")


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, how in IMPOSSIBLE.items():
        for last in (KEY, VALUE):
            yield tensor_fault(KIND, f"{last}-{name}", _changed(last, how), WHERE)
    for name, (receipts, plant) in OTHERS.items():
        yield tensor_fault(KIND, name, plant, WHERE, receipts=receipts)
    for name, (receipts, plant) in HEADERS.items():
        yield tensor_fault(KIND, name, plant, WHERE, level=STRUCTURE, receipts=receipts)
    for name, (wanted, change) in CONFIG.items():
        yield block_fault(f"cache-{name}", wanted, change, WHERE)


def stored(tensors: Tensors, last: str, layer: str = "{full}") -> str:
    """Return the stored name of a scale, whether it is there or not."""
    norm = tensors.stored(f"{layer}.input_layernorm.weight")
    return norm.replace("input_layernorm.weight", f"self_attn.{last}")


def _changed(last: str, how: Callable[[Tensor], Tensor]) -> Plant:
    def plant(tensors: Tensors) -> str:
        view = tensors.entry(stored(tensors, last)).view()
        view.copy_(how(view))
        return stored(tensors, last)

    return plant


IMPOSSIBLE: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "negative": torch.neg,
    "nan": lambda scale: scale * torch.nan,
    "infinite": lambda scale: scale * torch.inf,
    "never-written": lambda scale: torch.full_like(scale, 1e-38),
    "huge": lambda scale: scale * 1e9,
}


def _swap(tensors: Tensors) -> tuple[str, ...]:
    one, other = (tensors.entry(stored(tensors, last)) for last in (KEY, VALUE))
    one.data, other.data = other.data, one.data
    return stored(tensors, KEY), stored(tensors, VALUE)


def _ones(tensors: Tensors) -> tuple[str, ...]:
    """Leave both as engines initialise them."""
    for last in (KEY, VALUE):
        tensors.entry(stored(tensors, last)).view().fill_(1)
    return stored(tensors, KEY), stored(tensors, VALUE)


# Engines take a scale of 1, or a neighbour's, as well as another: only the text tells.
OTHERS: dict[str, tuple[tuple[str, ...], Plant]] = {
    "swapped": ((FORGED,), _swap),
    "ones": ((FORGED,), _ones),
    "doubled": ((FORGED,), _changed(KEY, lambda scale: scale * 2)),
    "off-by-two-percent": ((FORGED,), _changed(VALUE, lambda scale: scale * 1.02)),
    "of-amax-not-over-448": ((FORGED,), _changed(KEY, lambda scale: scale * 448)),
}


def _lost(*lasts: str) -> Plant:
    def plant(tensors: Tensors) -> str:
        for last in lasts:
            name = stored(tensors, last)
            del tensors.home(name).entries[name]
        return f"{KEY}|{VALUE}|{SCHEME}"

    return plant


def _stray(layer: str, wanted: str) -> Plant:
    """Give a scale to what has no cache that it could scale."""

    def plant(tensors: Tensors) -> str:
        source, name = tensors.entry(stored(tensors, KEY)), stored(tensors, KEY, layer)
        home = tensors.home(stored(tensors, KEY))
        home.entries[name] = Entry.renamed(source, name)
        return wanted

    return plant


def _two_numbers(tensors: Tensors) -> str:
    tensors.entry(stored(tensors, KEY)).put(torch.full((2,), 0.1, dtype=torch.bfloat16))
    return stored(tensors, KEY)


def _as_codes(tensors: Tensors) -> str:
    tensors.entry(stored(tensors, VALUE)).put(torch.ones(1).to(torch.float8_e4m3fn))
    return stored(tensors, VALUE)


HEADERS: dict[str, tuple[tuple[str, ...], Plant]] = {
    "keys-missing": (BOTH, _lost(KEY)),
    "values-missing": (BOTH, _lost(VALUE)),
    "both-missing": (BOTH, _lost(KEY, VALUE)),
    "of-a-delta-rule": (BOTH, _stray("layers.0", "layers.0.self_attn.k_scale")),
    "two-numbers": (BOTH, _two_numbers),
    "in-fp8": (BOTH, _as_codes),
}

# name: (what must be named, change)
CONFIG: dict[str, tuple[str, Change]] = {
    "not-asked-for": (f"cache {KEY}|{SCHEME}", put(SCHEME, None)),
    "key-lost": (f"cache|{SCHEME} {KEY}|{SCHEME}", lambda block: block.pop(SCHEME)),
    "in-four-bits": (f"{SCHEME} num_bits", lambda block: block[SCHEME].update(num_bits=4)),
    "of-integers": (f"{SCHEME} type", lambda block: block[SCHEME].update(type="int")),
    "dynamic": (f"{SCHEME} dynamic", lambda block: block[SCHEME].update(dynamic=True)),
    "symmetric-null": (f"{SCHEME} symmetric", lambda block: block[SCHEME].update(symmetric=None)),
    "dynamic-null": (f"{SCHEME} dynamic", lambda block: block[SCHEME].update(dynamic=None)),
    "by-channel": (f"{SCHEME} strategy", lambda block: block[SCHEME].update(strategy="channel")),
    "asymmetric": (f"{SCHEME} symmetric", lambda block: block[SCHEME].update(symmetric=False)),
    "a-name-alone": (SCHEME, put(SCHEME, "fp8")),
    "of-modelopt": ("kv_cache_quant_algo", put("kv_cache_quant_algo", "FP8")),
}
