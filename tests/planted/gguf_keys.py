"""What is planted into the metadata of a GGUF file: keys, and what they are changed to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from formats.gguf.header import Kv

Change = Callable[[Any], Any]
"""Returns another value of a key."""


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
    "template-without-an-end": (
        "tokenizer.chat_template",
        lambda text: text.replace("{%- if add_generation_prompt %}", "{%- if false %}"),
    ),
    "sections-of-time-alone": (".rope.dimension_sections", lambda s: [sum(s) - 2, 1, 1, 0]),
    "temperature": ("general.sampling.temp", to(1.5)),
    "top-k": ("general.sampling.top_k", to(1)),
    "file-type": ("general.file_type", to(2)),
    "file-type-of-a-neighbour": ("general.file_type", to(17)),
    "file-type-f16": ("general.file_type", to(1)),
    "file-type-unknown": ("general.file_type", to(99)),
    "type-of-an-adapter": ("general.type", to("adapter")),
}
RECAST: dict[str, tuple[str, str, Change]] = {
    "kind-of-the-name": ("general.name", "uint32", to(7)),
    "kind-of-the-tokens": ("tokenizer.ggml.tokens", "uint32", to(7)),
    "kind-of-a-key": (".rope.freq_base", "string", to("10000000")),
    "kind-of-a-count": (".block_count", "uint64", lambda n: n),
    "kind-of-heads": (".attention.head_count", "int32", lambda n: n),
    "kind-of-epsilon": (".attention.layer_norm_rms_epsilon", "float64", lambda x: x),
    "kind-of-sections": (".rope.dimension_sections", "array[int64]", lambda s: s),
    "kind-of-layers": (".attention.recurrent_layers", "array[uint8]", lambda v: list(map(int, v))),
    "kind-of-a-token": ("tokenizer.ggml.eos_token_id", "int32", lambda n: n),
    "kind-of-a-flag": ("tokenizer.ggml.add_bos_token", "uint8", int),
    "kind-of-types": ("tokenizer.ggml.token_type", "array[uint32]", lambda types: types),
    "kind-of-the-file-type": ("general.file_type", "uint64", lambda n: n),
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
    "rope-attention-factor": Kv("{arch}.rope.scaling.attn_factor", "float32", 2.0),
    "rope-extension": Kv("{arch}.rope.scaling.yarn_ext_factor", "float32", 1.0),
    "rope-of-a-window": Kv("{arch}.rope.freq_base_swa", "float32", 10000.0),
    "lower-case": Kv("tokenizer.ggml.normalizer.lowercase", "bool", True),
    "tokens-suppressed": Kv("tokenizer.ggml.suppress_tokens", "array[int32]", [5]),
    "middle-token": Kv("tokenizer.ggml.fim_mid_token_id", "uint32", 5),
    "least-probability": Kv("general.sampling.min_p", "float32", 0.5),
    "a-general-key": Kv("general.tensor_extra.prec_a4", "bool", True),
    "dense-layers-first": Kv("{arch}.leading_dense_block_count", "uint32", 1),
}
ADDED_TO_EXPERTS = {
    "gating-sigmoid": Kv("{arch}.expert_gating_func", "uint32", 2),
    "expert-weights-scale": Kv("{arch}.expert_weights_scale", "float32", 2.5),
    "expert-weights-norm": Kv("{arch}.expert_weights_norm", "bool", False),
    "experts-shared-count": Kv("{arch}.expert_shared_count", "uint32", 2),
    "expert-groups": Kv("{arch}.expert_group_count", "uint32", 2),
}
