"""Faults in a GGUF file's metadata: keys that llama.cpp obeys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from formats.gguf.header import Kv
from tests.planted.artifact import Artifact
from tests.planted.edit import editing
from tests.planted.fault import (
    BOTH,
    FORGED,
    NAMED,
    STRUCTURE,
    UNOPENED,
    Fault,
    Where,
    in_bases,
)
from tests.planted.gguf_keys import (
    ADDED,
    ADDED_TO_EXPERTS,
    CHANGED,
    MISSING,
    OF_EXPERTS,
    ONLY_BY_RECEIPT,
    RECAST,
    UNREADABLE,
    Change,
)

HOMES = in_bases("nano-q8_0", "wide-bf16", "wide-q4_k_m", "moe-mxfp4_moe", "wide-split")
MOE = in_bases("moe-q8_0", "moe-q4_k_m", "moe-mxfp4_moe")


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, (key, change) in CHANGED.items():
        yield _fault(name, key, change)
    for name, (key, change) in UNREADABLE.items():
        yield _fault(name, key, change, codes=UNOPENED)
    for name, (key, change) in OF_EXPERTS.items():
        yield _fault(name, key, change, MOE, UNOPENED)
    for name, (key, change) in ONLY_BY_RECEIPT.items():
        yield _fault(name, key, change, receipts=(FORGED,))
    key = "tokenizer.ggml.add_bos_token"
    yield Fault("metadata", f"missing-{key}", _remover(key), HOMES, STRUCTURE, receipts=(FORGED,))
    for name, plant in _planters():
        yield Fault("metadata", name, plant, HOMES, STRUCTURE, UNOPENED)
    for name, pair in ADDED_TO_EXPERTS.items():
        yield Fault("metadata", f"added-{name}", _adder(pair), MOE, STRUCTURE)


def _planters() -> Iterator[tuple[str, Callable[[Artifact], str]]]:
    """Yield name and change of what may leave a file that cannot be opened."""
    for key in MISSING:
        yield f"missing-{key}", _remover(key)
    for name, pair in ADDED.items():
        yield f"added-{name}", _adder(pair)
    for name, (key, kind, value) in RECAST.items():
        yield name, _recaster(key, kind, value)
    yield "key-heads-by-block", _heads_by_block
    yield "groups-with-the-same-product", _groups


def _fault(
    name: str,
    key: str,
    change: Change,
    where: Where = HOMES,
    codes: tuple[int, ...] = NAMED,
    receipts: tuple[str, ...] = BOTH,
) -> Fault:
    def plant(artifact: Artifact) -> str:
        with editing(artifact) as tensors:
            at = _find(tensors.pairs(), key)
            pair = tensors.pairs()[at]
            value = list(pair.value) if isinstance(pair.value, list) else pair.value
            tensors.pairs()[at] = replace(pair, value=change(value))
        return pair.key if codes == NAMED else key.removeprefix(".")

    return Fault("metadata", name, plant, where, STRUCTURE, codes, receipts)


def _find(pairs: list[Kv], key: str) -> int:
    """Return the place of a key, whose architecture may be left out: `.rope.freq_base`."""
    return next(i for i, pair in enumerate(pairs) if pair.key.endswith(key))


def _remover(key: str) -> Callable[[Artifact], str]:
    def plant(artifact: Artifact) -> str:
        with editing(artifact) as tensors:
            return tensors.pairs().pop(_find(tensors.pairs(), key)).key

    return plant


def _adder(pair: Kv) -> Callable[[Artifact], str]:
    def plant(artifact: Artifact) -> str:
        with editing(artifact) as tensors:
            arch = "qwen35moe" if artifact.base.moe else "qwen35"
            added = replace(pair, key=pair.key.format(arch=arch))
            tensors.pairs().append(added)
        return added.key

    return plant


def _recaster(key: str, kind: str, value: Change) -> Callable[[Artifact], str]:
    """Return what gives a key another kind, which llama.cpp refuses."""

    def plant(artifact: Artifact) -> str:
        with editing(artifact) as tensors:
            at = _find(tensors.pairs(), key)
            pair = tensors.pairs()[at]
            tensors.pairs()[at] = replace(pair, kind=kind, value=value(pair.value))
        return pair.key

    return plant


def _heads_by_block(artifact: Artifact) -> str:
    """Say that layers of the delta rule have no key heads: llama.cpp then reads none at all."""
    with editing(artifact) as tensors:
        pairs = tensors.pairs()
        heads, kinds = (
            _find(pairs, f".attention.{key}") for key in ("head_count_kv", "recurrent_layers")
        )
        count = pairs[heads].value
        sizes = [0 if recurrent else count for recurrent in pairs[kinds].value]
        pairs[heads] = replace(pairs[heads], kind="array[uint32]", value=sizes)
        return pairs[heads].key


def _groups(artifact: Artifact) -> str:
    """Let key heads be twice as wide and half as many, or the other way round."""
    with editing(artifact) as tensors:
        pairs = tensors.pairs()
        count, width = (_find(pairs, f".ssm.{key}") for key in ("group_count", "state_size"))
        more = pairs[count].value == 1
        pairs[count] = replace(pairs[count], value=2 if more else pairs[count].value // 2)
        pairs[width] = replace(
            pairs[width], value=pairs[width].value // 2 if more else 2 * pairs[width].value
        )
        return "ssm.group_count|ssm.state_size"
