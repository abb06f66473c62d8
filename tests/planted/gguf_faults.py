"""Faults in a GGUF file's metadata: keys that llama.cpp obeys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

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

HOMES = in_bases("nano-q8_0", "wide-bf16", "wide-q4_k_m", "moe-mxfp4_moe", "wide-split")
MOE = in_bases("moe-q8_0", "moe-q4_k_m", "moe-mxfp4_moe")
Change = Callable[[Any], Any]
"""Returns another value of a key."""


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
    for key in MISSING:
        yield Fault("metadata", f"missing-{key}", _remover(key), HOMES, STRUCTURE, UNOPENED)
    for name, pair in ADDED.items():
        yield Fault("metadata", f"added-{name}", _adder(pair), HOMES, STRUCTURE, UNOPENED)
    for name, pair in ADDED_TO_EXPERTS.items():
        yield Fault("metadata", f"added-{name}", _adder(pair), MOE, STRUCTURE)
    key = "tokenizer.ggml.add_bos_token"
    yield Fault("metadata", f"missing-{key}", _remover(key), HOMES, STRUCTURE, receipts=(FORGED,))
    yield Fault("metadata", "groups-with-the-same-product", _groups, HOMES, STRUCTURE, UNOPENED)
    yield Fault("metadata", "kind-of-a-key", _recast, HOMES, STRUCTURE, UNOPENED)


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


def _recast(artifact: Artifact) -> str:
    with editing(artifact) as tensors:
        at = _find(tensors.pairs(), ".rope.freq_base")
        tensors.pairs()[at] = replace(tensors.pairs()[at], kind="string", value="10000000")
        return tensors.pairs()[at].key


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


def to(value: Any) -> Change:
    """Return a change to a value."""
    return lambda _: value


def exchange(one: int, two: int) -> Change:
    """Return a change that swaps two entries of an array."""

    def change(values: list[Any]) -> list[Any]:
        values[one], values[two] = values[two], values[one]
        return values

    return change


def at(index: int, value: Any) -> Change:
    """Return a change of one entry of an array."""

    def change(values: list[Any]) -> list[Any]:
        values[index] = value
        return values

    return change


def _flip_layers(values: list[bool]) -> list[bool]:
    return [not values[0], *values[1:]]


CHANGED: dict[str, tuple[str, Change]] = {
    "rope-base-10000": (".rope.freq_base", to(10000.0)),
    "rope-base-1e6": (".rope.freq_base", to(1e6)),
    "rope-width-half": (".rope.dimension_count", lambda n: n // 2),
    "rope-width-all": (".rope.dimension_count", lambda n: 4 * n),
    "rope-sections-rotated": (".rope.dimension_sections", lambda s: [*s[1:3], s[0], s[3]]),
    "rope-sections-text": (".rope.dimension_sections", lambda s: [sum(s), 0, 0, 0]),
    "eps-1e-5": (".attention.layer_norm_rms_epsilon", to(1e-5)),
    "context": (".context_length", to(1024)),
    "interval": (".full_attention_interval", lambda n: n + 1),
    "end-token": ("tokenizer.ggml.eos_token_id", lambda n: n - 1),
    "pad-token": ("tokenizer.ggml.padding_token_id", lambda n: n + 1),
    "begin-token-added": ("tokenizer.ggml.add_bos_token", to(True)),
    "tokens-swapped": ("tokenizer.ggml.tokens", exchange(300, 301)),
    "tokens-renamed": ("tokenizer.ggml.tokens", at(65, "\u0103")),
    "merges-swapped": ("tokenizer.ggml.merges", exchange(0, 1)),
    "merges-lost": ("tokenizer.ggml.merges", lambda merges: merges[:-5]),
    "control-token-normal": (
        "tokenizer.ggml.token_type",
        lambda types: [1 if n == 3 else n for n in types],
    ),
    "token-unused": ("tokenizer.ggml.token_type", at(65, 5)),
    "pre-qwen2": ("tokenizer.ggml.pre", to("qwen2")),
    "pre-default": ("tokenizer.ggml.pre", to("default")),
    "model-llama": ("tokenizer.ggml.model", to("llama")),
    "template-cut": ("tokenizer.chat_template", lambda text: text[: len(text) // 2]),
    "template-of-another": ("tokenizer.chat_template", to("[INST] {{ messages }} [/INST]")),
    "template-empty": ("tokenizer.chat_template", to("")),
    "temperature": ("general.sampling.temp", to(1.5)),
    "top-k": ("general.sampling.top_k", to(1)),
    "file-type": ("general.file_type", to(2)),
    "type-of-an-adapter": ("general.type", to("adapter")),
}
UNREADABLE: dict[str, tuple[str, Change]] = {
    "rope-sections-zero": (".rope.dimension_sections", lambda s: [0, 0, 0, 0]),
    "eps-0": (".attention.layer_norm_rms_epsilon", to(0.0)),
    "layer-kinds": (".attention.recurrent_layers", _flip_layers),
    "layer-kinds-reversed": (".attention.recurrent_layers", lambda v: [*v[:-1][::-1], v[-1]]),
    "heads": (".attention.head_count", lambda n: 2 * n),
    "key-heads": (".attention.head_count_kv", lambda n: 2 * n),
    "head-width": (".attention.key_length", lambda n: n // 2),
    "value-width": (".attention.value_length", lambda n: n // 2),
    "embedding": (".embedding_length", lambda n: n // 2),
    "blocks": (".block_count", lambda n: n - 1),
    "conv-kernel": (".ssm.conv_kernel", to(3)),
    "state": (".ssm.state_size", lambda n: n // 2),
    "groups": (".ssm.group_count", lambda n: 2 * n),
    "rank": (".ssm.time_step_rank", lambda n: 2 * n),
    "inner": (".ssm.inner_size", lambda n: n // 2),
    "mtp-lost": (".nextn_predict_layers", to(0)),
    "mtp-twice": (".nextn_predict_layers", to(2)),
    "architecture": ("general.architecture", to("qwen3next")),
    "tokens-lost": ("tokenizer.ggml.tokens", lambda tokens: tokens[:-3]),
    "types-lost": ("tokenizer.ggml.token_type", lambda types: types[:-3]),
    "end-token-beyond": ("tokenizer.ggml.eos_token_id", to(1 << 20)),
}
OF_EXPERTS: dict[str, tuple[str, Change]] = {
    "fewer-experts-a-token": (".expert_used_count", to(1)),
    "more-experts-a-token": (".expert_used_count", to(4)),
    "experts": (".expert_count", to(2)),
    "expert-width": (".expert_feed_forward_length", to(128)),
    "shared-width": (".expert_shared_feed_forward_length", to(128)),
}
# What names the file and changes no result.
ONLY_BY_RECEIPT: dict[str, tuple[str, Change]] = {
    "name": ("general.name", to("Another Model")),
    "size-label": ("general.size_label", to("7B")),
    "quantization-version": ("general.quantization_version", to(1)),
}
MISSING = (
    ".rope.freq_base",
    ".rope.dimension_sections",
    ".rope.dimension_count",
    ".attention.layer_norm_rms_epsilon",
    ".ssm.state_size",
    ".nextn_predict_layers",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.chat_template",
    "general.architecture",
    ".attention.key_length",
)
ADDED = {
    "rope-scaling": Kv("{arch}.rope.scaling.factor", "float32", 4.0),
    "rope-scaling-type": Kv("{arch}.rope.scaling.type", "string", "yarn"),
    "rope-scaling-context": Kv("{arch}.rope.scaling.original_context_length", "uint32", 1024),
    "rope-scale-linear": Kv("{arch}.rope.scale_linear", "float32", 2.0),
    "rope-finetuned": Kv("{arch}.rope.scaling.finetuned", "bool", True),
    "not-causal": Kv("{arch}.attention.causal", "bool", False),
    "pooling": Kv("{arch}.pooling_type", "uint32", 1),
    "window": Kv("{arch}.attention.sliding_window", "uint32", 512),
    "attention-scale": Kv("{arch}.attention.scale", "float32", 0.5),
    "clamp": Kv("{arch}.attention.clamp_kqv", "float32", 1.0),
    "logit-scale": Kv("{arch}.logit_scale", "float32", 0.5),
    "soft-cap": Kv("{arch}.final_logit_softcapping", "float32", 30.0),
    "bos-token": Kv("tokenizer.ggml.bos_token_id", "uint32", 5),
    "eot-token": Kv("tokenizer.ggml.eot_token_id", "uint32", 5),
    "end-token-added": Kv("tokenizer.ggml.add_eos_token", "bool", True),
    "space-prefix": Kv("tokenizer.ggml.add_space_prefix", "bool", True),
    "spaces-removed": Kv("tokenizer.ggml.remove_extra_whitespaces", "bool", True),
    "template-named": Kv("tokenizer.chat_template.tool_use", "string", "{{ messages }}"),
    "classes": Kv("{arch}.classifier.output_labels", "array[string]", ["a", "b"]),
    "penalty": Kv("general.sampling.penalty_repeat", "float32", 1.5),
    "vocabulary": Kv("{arch}.vocab_size", "uint32", 100),
    "dense-layers-first": Kv("{arch}.leading_dense_block_count", "uint32", 1),
}
ADDED_TO_EXPERTS = {
    "gating-sigmoid": Kv("{arch}.expert_gating_func", "uint32", 2),
    "expert-weights-scale": Kv("{arch}.expert_weights_scale", "float32", 2.5),
    "expert-weights-norm": Kv("{arch}.expert_weights_norm", "bool", False),
    "experts-shared-count": Kv("{arch}.expert_shared_count", "uint32", 2),
    "expert-groups": Kv("{arch}.expert_group_count", "uint32", 2),
}
