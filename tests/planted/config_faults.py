"""Faults in config.json: a field that an engine obeys, and that no tensor contradicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.planted.artifact import Artifact
from tests.planted.fault import STRUCTURE, UNOPENED, Fault, Where, in_bases

CONFIG = "config.json"
Change = Callable[[dict[str, Any], dict[str, Any]], object]
"""Changes the whole config, of which the second argument is the text part."""
HOMES = in_bases(
    "nano-fp8-block",
    "moe-fp8-block",
    "nano-fp8-block-hub",
    "wide-fp8-channel",
    "wide-bf16-split",
    "wide-mixed",
)
MOE = in_bases("moe-fp8-block", "moe-fp8-block-hub", "moe-bf16-split")
HUB = in_bases("nano-fp8-block-hub", "moe-fp8-block-hub")


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, (field, change) in TEXT.items():
        yield config_fault(name, field, change)
    for name, (field, change) in REFUSED.items():
        yield config_fault(name, field, change, codes=UNOPENED)
    for name, (field, change) in ADDED.items():
        yield config_fault(name, field, change)
    for name, (field, change) in EXPERTS.items():
        yield config_fault(name, field, change, MOE)
    yield config_fault(
        "weights-of-experts-as-they-are",
        "norm_topk_prob",
        put("norm_topk_prob", False),
        MOE,
        codes=UNOPENED,
    )
    another = put("model_type", "qwen3_vl_text")
    yield config_fault("text-type-of-another-family", "model_type", another, HUB, codes=UNOPENED)
    for name, (field, change) in NESTED.items():
        yield config_fault(name, field, change, HUB)


def config_fault(name: str, field: str, change: Change, where: Where = HOMES, **more: Any) -> Fault:
    """Return a fault of this kind, of which the field must be named."""

    def plant(artifact: Artifact) -> tuple[str, ...]:
        with artifact.json(CONFIG) as config:
            change(config, config.get("text_config", config))
        return (field,)

    return Fault("config", name, plant, where, STRUCTURE, **more)


def put(field: str, value: Any) -> Change:
    """Return a change of one field of the text part; `rope_parameters.x` is one inside."""

    def change(_: dict[str, Any], text: dict[str, Any]) -> None:
        part, _, last = field.rpartition(".")
        (text[part] if part else text)[last] = value

    return change


def root(field: str, value: Any) -> Change:
    """Return a change of one field of the whole."""
    return lambda config, _: config.update({field: value})


def gone(field: str) -> Change:
    """Return a change that removes a field of the text part."""
    return lambda _, text: text.pop(field)


def scaled(*fields: str) -> Change:
    """Return a change that doubles the first field and halves the others."""

    def change(_: dict[str, Any], text: dict[str, Any]) -> None:
        text[fields[0]] *= 2
        for field in fields[1:]:
            text[field] //= 2

    return change


def _reverse_layers(_: dict[str, Any], text: dict[str, Any]) -> None:
    text["layer_types"].reverse()


def _rotate_sections(_: dict[str, Any], text: dict[str, Any]) -> None:
    sections = text["rope_parameters"]["mrope_section"]
    sections.append(sections.pop(0))


def _untie(config: dict[str, Any], text: dict[str, Any]) -> None:
    tied = text["tie_word_embeddings"]
    for part in (config, text):
        part["tie_word_embeddings"] = not tied


def _interval(_: dict[str, Any], text: dict[str, Any]) -> None:
    text["full_attention_interval"] += 1


def _key_heads(_: dict[str, Any], text: dict[str, Any]) -> None:
    """Let the product stay: no shape shows it."""
    one = text["linear_num_key_heads"] == 1
    fields = ("linear_num_key_heads", "linear_key_head_dim")[:: 1 if one else -1]
    scaled(*fields)(text, text)


def _without(field: str) -> Change:
    return lambda _, text: text["rope_parameters"].pop(field)


def _other_class(config: dict[str, Any], _: dict[str, Any]) -> None:
    dense = "Moe" in config["architectures"][0]
    config["architectures"] = ["Qwen3_5ForCausalLM" if dense else "Qwen3_5MoeForCausalLM"]


def _other_type(config: dict[str, Any], text: dict[str, Any]) -> None:
    dense = "moe" in text["model_type"]
    text["model_type"] = "qwen3_5_text" if dense else "qwen3_5_moe_text"


# name: (field that must be named, change)
TEXT: dict[str, tuple[str, Change]] = {
    "rope-theta-10000": ("rope_theta", put("rope_parameters.rope_theta", 10000)),
    "rope-theta-1e6": ("rope_theta", put("rope_parameters.rope_theta", 1000000)),
    "rope-theta-at-the-root": ("rope_theta", put("rope_theta", 10000)),
    "rotary-factor-half": (
        "partial_rotary_factor",
        put("rope_parameters.partial_rotary_factor", 0.5),
    ),
    "rotary-factor-whole": (
        "partial_rotary_factor",
        put("rope_parameters.partial_rotary_factor", 1.0),
    ),
    "mrope-section-rotated": ("mrope_section", _rotate_sections),
    "mrope-section-missing": ("mrope_section", _without("mrope_section")),
    "mrope-not-interleaved": ("mrope_interleaved", put("rope_parameters.mrope_interleaved", False)),
    "eps-1e-5": ("rms_norm_eps", put("rms_norm_eps", 1e-5)),
    "eps-1e-12": ("rms_norm_eps", put("rms_norm_eps", 1e-12)),
    "layer-types-reversed": ("layer_types|linear_attn|self_attn", _reverse_layers),
    "interval-against-layer-types": ("full_attention_interval", _interval),
    "heads-with-the-same-product": (
        "num_attention_heads|head_dim|q_norm",
        scaled("num_attention_heads", "head_dim"),
    ),
    "key-heads-with-the-same-product": ("linear_num_key_heads|linear_key_head_dim", _key_heads),
    "eos-token": ("eos_token_id", put("eos_token_id", 7)),
    "eos-token-beyond": ("eos_token_id", put("eos_token_id", 1 << 20)),
    "pad-token-beyond": ("pad_token_id", put("pad_token_id", 1 << 20)),
    "eos-token-list": ("eos_token_id", put("eos_token_id", [7, 8])),
    "eos-token-missing": ("eos_token_id", gone("eos_token_id")),
    "tie-flags": ("tie_word_embeddings", _untie),
    "mtp-lost": ("mtp_num_hidden_layers", put("mtp_num_hidden_layers", 0)),
    "mtp-twice": ("mtp_num_hidden_layers|mtp.layers.1", put("mtp_num_hidden_layers", 2)),
    "mtp-own-embeddings": (
        "mtp_use_dedicated_embeddings",
        put("mtp_use_dedicated_embeddings", True),
    ),
    "vocabulary-longer": ("vocab_size|embed_tokens", put("vocab_size", 4096)),
    "vocabulary-shorter": ("vocab_size|embed_tokens", put("vocab_size", 500)),
    "context": ("max_position_embeddings", put("max_position_embeddings", 2048)),
    "state-in-bfloat16": ("mamba_ssm_dtype", put("mamba_ssm_dtype", "bfloat16")),
    "class-of-the-other-kind": ("architectures|names Qwen3_5", _other_class),
    "class-of-another-family": (
        "architectures|Qwen3ForCausalLM",
        root("architectures", ["Qwen3ForCausalLM"]),
    ),
    "class-of-a-reward-model": (
        "architectures|SequenceClassification",
        root("architectures", ["Qwen3_5ForSequenceClassification"]),
    ),
    "a-class-more": (
        "architectures|LlamaForCausalLM",
        lambda config, _: config["architectures"].append("LlamaForCausalLM"),
    ),
    "class-as-text": (
        "architectures|no list",
        lambda config, _: config.update(architectures=config["architectures"][0]),
    ),
    "no-class": ("architectures|names None", lambda config, _: config.pop("architectures")),
    "dtype-float16": ("dtype", root("dtype", "float16")),
    "text-dtype-float16": ("dtype", put("dtype", "float16")),
    "dtype-of-torch": ("dtype", put("dtype", "torch.bfloat16")),
    "old-dtype-of-torch": ("torch_dtype", put("torch_dtype", "torch.bfloat16")),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
REFUSED: dict[str, tuple[str, Change]] = {
    "rope-theta-missing": ("rope_theta", _without("rope_theta")),
    "rope-parameters-missing": ("rope_parameters|rope_theta", gone("rope_parameters")),
    "rope-type-linear": ("rope_type", put("rope_parameters.rope_type", "linear")),
    "model-type-of-the-other-kind": ("model_type|num_experts|intermediate_size", _other_type),
    "yarn-in-rope-parameters": (
        "rope_type|factor",
        lambda _, text: text["rope_parameters"].update(YARN),
    ),
    "no-output-gate": ("attn_output_gate", put("attn_output_gate", False)),
    "another-activation": ("hidden_act", put("hidden_act", "gelu")),
    "biased-attention": ("attention_bias", put("attention_bias", True)),
    "sigmoid-gate": ("output_gate_type", put("output_gate_type", "sigmoid")),
    "conv-kernel": ("linear_conv_kernel_dim|conv1d", put("linear_conv_kernel_dim", 3)),
    "hidden-size": ("hidden_size|embed_tokens", put("hidden_size", 512)),
    "heads-alone": ("num_attention_heads|q_proj", scaled("num_attention_heads")),
    "value-heads-alone": ("linear_num_value_heads|in_proj", scaled("linear_num_value_heads")),
    "a-layer-too-many": ("num_hidden_layers|layer_types|layers", put("num_hidden_layers", 5)),
    "model-type-unknown": (
        "model_type",
        lambda config, text: (config.update(model_type="qwen9"), text.update(model_type="qwen9")),
    ),
    "model-type-next": ("model_type|qwen3_next|num_experts", put("model_type", "qwen3_next")),
    "theta-as-text": ("rope_theta", put("rope_parameters.rope_theta", "10000000")),
    "eps-as-text": ("rms_norm_eps", put("rms_norm_eps", "1e-6")),
}
ADDED: dict[str, tuple[str, Change]] = {
    "yarn-in-rope-scaling": ("rope_scaling", put("rope_scaling", YARN)),
    "sliding-window": ("sliding_window", put("sliding_window", 1024)),
    "chunked-attention": (
        "dual_chunk_attention_config",
        put("dual_chunk_attention_config", {"chunk_size": 512, "local_size": 128}),
    ),
    "code-to-run": ("auto_map", root("auto_map", {"AutoModel": "evil.Model"})),
    "torch-dtype": ("torch_dtype", root("torch_dtype", "float16")),
    "begin-of-text": ("bos_token_id", root("bos_token_id", 7)),
    "pad-token": ("pad_token_id", put("pad_token_id", 7)),
    "dropout": ("attention_dropout", put("attention_dropout", 0.1)),
    "a-window-pattern": ("attention_chunk_size", put("attention_chunk_size", 256)),
    "encoder": ("is_causal", put("is_causal", False)),
}
EXPERTS: dict[str, tuple[str, Change]] = {
    "fewer-experts-a-token": ("num_experts_per_tok", put("num_experts_per_tok", 1)),
    "more-experts-a-token": ("num_experts_per_tok", put("num_experts_per_tok", 4)),
    "routed-scaling": ("routed_scaling_factor", put("routed_scaling_factor", 2.5)),
    "experts-more": ("num_experts|experts.4|mlp.gate", put("num_experts", 5)),
}


def vision(field: str, value: Any) -> Change:
    """Return a change of the vision part."""
    return lambda config, _: config["vision_config"].update({field: value})


NESTED: dict[str, tuple[str, Change]] = {
    "tie-flag-of-the-text-alone": (
        "tie_word_embeddings",
        lambda _, text: text.update(tie_word_embeddings=not text["tie_word_embeddings"]),
    ),
    "tie-flag-of-the-root-alone": (
        "tie_word_embeddings",
        lambda config, _: config.update(tie_word_embeddings=not config["tie_word_embeddings"]),
    ),
    "text-field-at-the-root": ("rope_theta", root("rope_theta", 10000)),
    "layers-at-the-root": ("num_hidden_layers", root("num_hidden_layers", 1)),
    "vision-heads": ("num_heads", vision("num_heads", 1)),
    "vision-activation": ("hidden_act", vision("hidden_act", "gelu")),
    "vision-deepstack": ("deepstack_visual_indexes", vision("deepstack_visual_indexes", [0])),
    "vision-merge": ("spatial_merge_size|visual.merger", vision("spatial_merge_size", 1)),
    "vision-depth": ("depth|visual.blocks", vision("depth", 2)),
    "image-token": ("image_token_id", root("image_token_id", 3)),
    "video-token": ("video_token_id", root("video_token_id", 3)),
    "vision-start-token": ("vision_start_token_id", root("vision_start_token_id", 3)),
    "vision-end-token-missing": (
        "vision_end_token_id",
        lambda config, _: config.pop("vision_end_token_id"),
    ),
    "language-model-only": ("language_model_only", root("language_model_only", True)),
}
