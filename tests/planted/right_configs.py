"""Right configs of others: other spellings, places and defaults that mean the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.planted.artifact import Artifact

Change = Callable[[dict[str, Any], dict[str, Any]], object]
"""Changes the whole config, of which the second argument is the text part."""
BLOCK = "quantization_config"


def changes() -> Iterator[tuple[str, str, str, Callable[[Artifact], object]]]:
    """Yield kind, name, base and change of each."""
    for name, (bases, change) in CONFIGS.items():
        for base in bases:
            yield "config", name, base, partial(_change, change=change)


def _change(artifact: Artifact, change: Change) -> None:
    artifact.strip()
    with artifact.json("config.json") as config:
        change(config, config.get("text_config", config))


def _old_rope(_: dict[str, Any], text: dict[str, Any]) -> None:
    """Write rotary fields as transformers 4 did: theta and factor beside a block of the rest."""
    block = text.pop("rope_parameters")
    text |= {key: block.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
    text["rope_scaling"] = block | {"type": "mrope", "rope_type": "default"}


def _rope_twice(_: dict[str, Any], text: dict[str, Any]) -> None:
    block = text["rope_parameters"]
    text |= {"rope_scaling": dict(block), "rope_theta": float(block["rope_theta"])}
    text["partial_rotary_factor"] = block["partial_rotary_factor"]


def _theta_beside_the_block(_: dict[str, Any], text: dict[str, Any]) -> None:
    block = text["rope_parameters"]
    text |= {key: block.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
    text["rope_scaling"] = None


def _old_type(config: dict[str, Any], text: dict[str, Any]) -> None:
    """Write `torch_dtype`, in each part."""
    text.pop("dtype", None)
    for part in (config, text, config.get("vision_config", text)):
        part["torch_dtype"] = "bfloat16"


def _list_alone(_: dict[str, Any], text: dict[str, Any]) -> None:
    assert text.pop("full_attention_interval") == 4


def _interval_alone(_: dict[str, Any], text: dict[str, Any]) -> None:
    del text["layer_types"]


def _without_defaults(_: dict[str, Any], text: dict[str, Any]) -> None:
    """Leave out what every class has by itself."""
    for field in ("attention_bias", "attention_dropout", "attn_output_gate", "hidden_act"):
        text.pop(field, None)
    for field in ("linear_conv_kernel_dim", "rms_norm_eps", "initializer_range", "use_cache"):
        text.pop(field, None)
    text.pop("mtp_use_dedicated_embeddings", None)


def _of_transformers_4(config: dict[str, Any], text: dict[str, Any]) -> None:
    """Write every part with all fields of its base class, as transformers 4 did."""
    for part in (text, config.get("vision_config", text)):
        part |= {key: value for key, value in OF_TRANSFORMERS_4.items() if key not in part}


def _records(config: dict[str, Any], text: dict[str, Any]) -> None:
    config |= {"_name_or_path": "/models/x", "unsloth_fixed": True, "model_name": "x/y"}
    text |= {"use_cache": False, "_attn_implementation_autoset": True, "router_aux_loss_coef": 0.1}


def _pad_token(_: dict[str, Any], text: dict[str, Any]) -> None:
    """Fine-tuners write the tokenizer's pad token; here it is the first added token."""
    text["pad_token_id"] = 1984 if text["vocab_size"] == 2048 else 500


def _text_at_the_root(config: dict[str, Any], text: dict[str, Any]) -> None:
    """Repeat what many scripts look for at the root."""
    for field in ("hidden_size", "num_hidden_layers", "vocab_size", "layer_types"):
        config[field] = text[field]
    config["rope_theta"] = text["rope_parameters"]["rope_theta"]
    config |= {"eos_token_id": text["eos_token_id"], "mtp_num_hidden_layers": 1}
    config["rope_parameters"] = text["rope_parameters"]


def _outer_fields(config: dict[str, Any], _: dict[str, Any]) -> None:
    """Keep the tokens of vision in a text-only config; write the defaults of the outer class."""
    of_nano = config["vocab_size"] == 2048
    config |= {"image_token_id": 1989 if of_nano else 505, "language_model_only": False}


def _vision(config: dict[str, Any], _: dict[str, Any]) -> None:
    vision = config["vision_config"]
    moe = "moe" in config["model_type"]
    vision |= {"model_type": "qwen3_5_moe_vision" if moe else "qwen3_5_vision"}
    vision |= {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"}}
    vision |= {"dtype": "bfloat16", "initializer_range": 0.01}
    del vision["deepstack_visual_indexes"]
    for field in ("temporal_patch_size", "in_channels", "hidden_act"):
        vision.pop(field)


def _stated(_: dict[str, Any], text: dict[str, Any]) -> None:
    """State what is so anyway."""
    text |= {"output_gate_type": "swish", "mlp_only_layers": [], "is_causal": True}
    text |= {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 28}
    text |= {"rope_scaling": None, "head_dim": text["head_dim"], "mamba_ssm_dtype": "float32"}


def _float32(config: dict[str, Any], text: dict[str, Any]) -> None:
    text["dtype"] = "float32"
    config["torch_dtype"] = "float32"


def _block_in_both(config: dict[str, Any], text: dict[str, Any]) -> None:
    text[BLOCK] = config[BLOCK]


def _block_in_the_text(config: dict[str, Any], text: dict[str, Any]) -> None:
    text[BLOCK] = config.pop(BLOCK)


def _of_transformers_5(config: dict[str, Any], _: dict[str, Any]) -> None:
    """Write what `FineGrainedFP8Config` writes of itself."""
    config[BLOCK] |= {"dequantize": False, "modules_to_convert": None, "scale_fmt": "float"}
    config[BLOCK] |= {"expert_dtype": "fp8", "producer": {"name": "x", "version": "1"}}


def _two_lists(config: dict[str, Any], _: dict[str, Any]) -> None:
    config[BLOCK]["ignored_layers"] = list(config[BLOCK]["modules_to_not_convert"])


def _an_empty_list(config: dict[str, Any], _: dict[str, Any]) -> None:
    config[BLOCK]["ignored_layers"] = []


def _of_compressed_tensors(config: dict[str, Any], _: dict[str, Any]) -> None:
    """Write what its versions have written, all at once."""
    dense = {"format": "dense", "global_sparsity": 0.14, "ignore": [], "targets": []}
    config[BLOCK] |= {"sparsity_config": dense, "run_compressed": True}
    config[BLOCK] |= {"global_compression_ratio": 1.47, "transform_config": {"config_groups": {}}}
    for group in config[BLOCK]["config_groups"].values():
        more = {"observer": "minmax", "observer_kwargs": {}, "actorder": None, "zp_dtype": None}
        group["weights"] |= more | {"scale_dtype": None}
        group["weights"] |= {} if "group_size" in group["weights"] else {"group_size": None}
        group["input_activations"] |= {"observer": None, "scale_dtype": "torch.bfloat16"}
        del group["output_activations"]


def _weights_alone(config: dict[str, Any], _: dict[str, Any]) -> None:
    """Quantise weights, not activations: W8A16."""
    for group in config[BLOCK]["config_groups"].values():
        group["input_activations"] = None


def _by_formats_of_groups(config: dict[str, Any], _: dict[str, Any]) -> None:
    config[BLOCK] |= {"format": "mixed-precision"}


def _one_format(config: dict[str, Any], _: dict[str, Any]) -> None:
    """Say the format once for all, under the name that older versions gave it."""
    config[BLOCK] |= {"format": "naive-quantized"}
    for group in config[BLOCK]["config_groups"].values():
        del group["format"]


def _size_of_blocks_as_text(config: dict[str, Any], _: dict[str, Any]) -> None:
    group = config[BLOCK]["config_groups"]["FP8_BLOCK"]
    group["weights"]["block_structure"] = "128x128"
    group["input_activations"] |= {"strategy": "token"}
    del group["input_activations"]["group_size"]


OF_TRANSFORMERS_4: dict[str, Any] = {
    "_name_or_path": "", "add_cross_attention": False, "architectures": None,
    "bad_words_ids": None, "begin_suppress_tokens": None, "bos_token_id": None,
    "chunk_size_feed_forward": 0, "cross_attention_hidden_size": None,
    "decoder_start_token_id": None, "diversity_penalty": 0.0, "do_sample": False,
    "early_stopping": False, "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None, "finetuning_task": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": False,
    "is_encoder_decoder": False, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0,
    "max_length": 20, "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1,
    "num_beams": 1, "num_return_sequences": 1, "output_attentions": False,
    "output_hidden_states": False, "output_scores": False, "pad_token_id": None, "prefix": None,
    "problem_type": None, "pruned_heads": {}, "remove_invalid_values": False,
    "repetition_penalty": 1.0, "return_dict": True, "return_dict_in_generate": False,
    "sep_token_id": None, "suppress_tokens": None, "task_specific_params": None,
    "temperature": 1.0, "tf_legacy_loss": False, "tie_encoder_decoder": False,
    "tokenizer_class": None, "top_k": 50, "top_p": 1.0, "torchscript": False, "typical_p": 1.0,
    "use_bfloat16": False,
}  # fmt: skip

TEXTS = ("nano-fp8-block", "wide-bf16-split", "moe-fp8-block-hub")
HUBS = ("nano-fp8-block-hub", "moe-fp8-block-hub")
COMPRESSED = ("wide-fp8-channel", "wide-mixed")
CONFIGS: dict[str, tuple[tuple[str, ...], Change]] = {
    "rope as before": (TEXTS, _old_rope),
    "rope in two places": (TEXTS, _rope_twice),
    "theta beside the block": (TEXTS, _theta_beside_the_block),
    "torch_dtype": (TEXTS, _old_type),
    "layer types alone": (("nano-fp8-block", "nano-fp8-block-hub"), _list_alone),
    "interval alone": (TEXTS, _interval_alone),
    "without defaults": (TEXTS, _without_defaults),
    "all fields of transformers 4": (TEXTS, _of_transformers_4),
    "records": (TEXTS, _records),
    "pad token of the tokenizer": (TEXTS, _pad_token),
    "text fields at the root": (HUBS, _text_at_the_root),
    "outer fields in a text config": (("nano-fp8-block", "wide-bf16-split"), _outer_fields),
    "vision of transformers 5": (HUBS, _vision),
    "what is so anyway": (TEXTS, _stated),
    "computed in float32": (("nano-bf16-split", "moe-bf16-split"), _float32),
    "block in both parts": (HUBS, _block_in_both),
    "block in the text part": (HUBS, _block_in_the_text),
    "block of transformers 5": (("nano-fp8-block", "moe-fp8-block-hub"), _of_transformers_5),
    "two lists": (("nano-fp8-block",), _two_lists),
    "an empty list": (("nano-fp8-block", "moe-fp8-block"), _an_empty_list),
    "block of compressed-tensors": (COMPRESSED, _of_compressed_tensors),
    "weights alone": (COMPRESSED, _weights_alone),
    "formats of groups": (COMPRESSED, _by_formats_of_groups),
    "one format": (COMPRESSED, _one_format),
    "block structure as text": (("wide-mixed",), _size_of_blocks_as_text),
}
