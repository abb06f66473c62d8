"""The source models that artifacts are made from, small but whole: side files, vision, MTP.

    nano   the bundled trained model: embeddings tied, head_dim 256
    wide   dense, embeddings untied, o_proj square, rows of whole K blocks, heads 1:3
    moe    a mixture of experts, fused, else like `wide`
    cast   the text part of `wide`, all in BF16: what transformers keeps as it is

`other` models have the same shapes and other values.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch

from formats.family.slots import Form
from tests.checkpoints import Weights, hub_config, make_weights, text_config, write_checkpoint

NANO = Path(__file__).parent.parent / "data" / "nano-dense"
VOCAB = 512
NUM_TOKENS = 500
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
}
LAYERS = ("linear_attention", "linear_attention", "full_attention")
NUM_LAYERS = {"nano": 4, "wide": 3, "moe": 2, "cast": 3}
EXPERTS = {
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def sizes(*, moe: bool) -> dict[str, Any]:
    """Return what a config of these models says beyond `tests.checkpoints`."""
    layers = LAYERS[1:] if moe else LAYERS
    more = EXPERTS if moe else {"intermediate_size": 512}
    return (
        SIZES
        | more
        | {
            "num_hidden_layers": len(layers),
            "layer_types": list(layers),
            "full_attention_interval": len(layers),
            "eos_token_id": NUM_TOKENS,
            "rope_parameters": rope(),
        }
    )


def rope() -> dict[str, Any]:
    """Return rotary parameters of heads of 64: eight frequencies."""
    return {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
    }


def symbols(model: str) -> dict[str, str]:
    """Return what differs between the models in the names of tensors.

    full     the layer of full attention
    mlp      the MLP of the first layer, and of a mixture of experts its second expert
    last     the same of the last layer
    delta    the delta rule of the first layer
    experts  the experts of the second layer
    """
    full = f"layers.{NUM_LAYERS[model] - 1}"
    expert = "experts.1." if model == "moe" else ""
    first = {"delta": "layers.0.linear_attn.", "experts": "layers.1.mlp.experts."}
    return first | {"full": full, "mlp": f"layers.0.mlp.{expert}", "last": f"{full}.mlp.{expert}"}


def write_model(name: str, folder: Path, seed: int = 35) -> Path:
    """Write a model and return its folder."""
    return MODELS[name](folder / name, seed)


def _nested(folder: Path, seed: int, *, moe: bool) -> Path:
    config = hub_config(moe=moe, **sizes(moe=moe))
    config |= {"transformers_version": "4.57.0.dev0", "image_token_id": NUM_TOKENS + 5}
    config |= {"video_token_id": NUM_TOKENS + 6}
    config |= {"vision_start_token_id": NUM_TOKENS + 3, "vision_end_token_id": NUM_TOKENS + 4}
    write_checkpoint(folder, config, make_weights(config, seed=seed))
    write_sides(folder)
    return folder


def _cast(folder: Path, seed: int) -> Path:
    """Write a text model without MTP and without F32."""
    config = text_config(**sizes(moe=False) | {"mtp_num_hidden_layers": 0})
    config |= {"architectures": ["Qwen3_5ForCausalLM"]}
    form = Form(vision=False, mtp_layers=0)
    weights = make_weights(config, form, namespace="text", seed=seed)
    write_checkpoint(folder, config, in_bf16(weights))
    write_sides(folder)
    return folder


def in_bf16(weights: Weights) -> Weights:
    """Return weights in BF16 only, as Qwen3.6 and later have them."""
    return {name: value.to(torch.bfloat16) for name, value in weights.items()}


def write_sides(folder: Path) -> None:
    """Write the bundled model's side files, its tokenizer cut down to the vocabulary."""
    for path in NANO.iterdir():
        if path.suffix in (".jinja", ".json") and path.name not in ("config.json", *_of_tokens()):
            shutil.copyfile(path, folder / path.name)
    (folder / "model.safetensors.index.json").unlink()
    tokenizer = json.loads((NANO / "tokenizer.json").read_bytes())
    first = tokenizer["added_tokens"][0]["id"]
    (folder / "tokenizer.json").write_text(json.dumps(_cut(tokenizer, first), ensure_ascii=False))
    _write_config(folder, first)


def _of_tokens() -> tuple[str, ...]:
    return ("tokenizer.json", "tokenizer_config.json", "vocab.json")


def _cut(tokenizer: dict[str, Any], first: int) -> dict[str, Any]:
    """Keep the first tokens and the merges that make them; added tokens follow."""
    model = tokenizer["model"]
    vocab = {token: i for token, i in model["vocab"].items() if i < NUM_TOKENS}
    merges = [pair for pair in model["merges"] if "".join(pair) in vocab]
    added = [
        token | {"id": token["id"] - first + NUM_TOKENS} for token in tokenizer["added_tokens"]
    ]
    return tokenizer | {
        "added_tokens": added,
        "model": model | {"vocab": vocab, "merges": merges},
    }


def _write_config(folder: Path, first: int) -> None:
    config = json.loads((NANO / "tokenizer_config.json").read_bytes())
    decoder = config["added_tokens_decoder"]
    config["added_tokens_decoder"] = {
        str(int(i) - first + NUM_TOKENS): token for i, token in decoder.items()
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    generation = json.loads((NANO / "generation_config.json").read_bytes())
    generation |= {"bos_token_id": NUM_TOKENS, "pad_token_id": NUM_TOKENS}
    generation["eos_token_id"] = [NUM_TOKENS + 2, NUM_TOKENS]
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))


def _nano(folder: Path, seed: int) -> Path:
    """Link the bundled model; with another seed, shuffle the rows of its weights."""
    if seed == 35:
        return NANO
    raise NotImplementedError(f"there is one {folder.name}")


MODELS = {
    "nano": _nano,
    "wide": partial(_nested, moe=False),
    "moe": partial(_nested, moe=True),
    "cast": _cast,
}
