"""Right folders of others: other scales, lists and indexes; compressed-tensors; transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests.planted.artifact import Artifact, Workshop
from tests.planted.edit import INDEX, editing

Change = Callable[[Artifact], object]
Make = Callable[[Workshop, Path], tuple[Path, Path]]
BLOCK, LIST = "quantization_config", "modules_to_not_convert"


def changes() -> Iterator[tuple[str, str, str, Change]]:
    """Yield kind, name, base and change of each."""
    for name, (bases, change) in FILES.items():
        for base in bases:
            yield "files", name, base, partial(_others, change=change)
    for name, (bases, change) in AFTERWARDS.items():
        for base in bases:
            yield "files", name, base, change


def _others(artifact: Artifact, change: Change) -> None:
    artifact.strip()
    change(artifact)


def _ignored_layers(artifact: Artifact) -> None:
    with artifact.json("config.json") as config:
        block = config[BLOCK]
        block["ignored_layers"] = block.pop(LIST)


def _official_list(artifact: Artifact) -> None:
    """List norms, biases and fused names too, as the official files do."""
    with artifact.json("config.json") as config:
        text = config.get("text_config", config)
        names = config[BLOCK][LIST]
        for i, kind in enumerate(text["layer_types"]):
            prefix = f"model.language_model.layers.{i}."
            names += [prefix + "input_layernorm", prefix + "post_attention_layernorm"]
            if kind == "full_attention":
                names += [prefix + "self_attn.q_norm", prefix + "self_attn.k_norm"]
            else:
                delta = prefix + "linear_attn."
                names += [delta + n for n in ("A_log", "dt_bias", "norm", "in_proj_ba")]
        names.sort()
    with artifact.json(INDEX) as index:
        index["metadata"]["total_size"] = float(index["metadata"]["total_size"])


def _ignore_by_patterns(artifact: Artifact) -> None:
    """Ignore as llm-compressor's recipes do."""
    patterns = (
        "embed_tokens$",
        "linear_attn\\.in_proj_[ab]$",
        "conv1d$",
        "mtp\\.fc$",
        "mlp\\.gate$",
        "shared_expert_gate$",
    )
    with artifact.json("config.json") as config:
        config[BLOCK]["ignore"] = ["lm_head", *(f"re:.*{p}" for p in patterns)]
        config[BLOCK] |= {"transform_config": {}, "sparsity_config": {}}


def _bare_index(artifact: Artifact) -> None:
    with artifact.json(INDEX) as index:
        del index["metadata"]


def _empty_metadata(artifact: Artifact) -> None:
    with artifact.json(INDEX) as index:
        index["metadata"] = {}


def _float_total(artifact: Artifact) -> None:
    with artifact.json(INDEX) as index:
        index["metadata"] |= {"total_size": float(index["metadata"]["total_size"])}
        index["metadata"]["total_parameters"] = 12345


def _no_index(artifact: Artifact) -> None:
    artifact.file(INDEX).unlink()


def _no_header_metadata(artifact: Artifact) -> None:
    with editing(artifact) as tensors:
        for file in tensors.files:
            file.metadata = {}


def _by_name(artifact: Artifact) -> None:
    """Store tensors by name within their width, as safetensors' own writer does."""
    with editing(artifact) as tensors:
        for file in tensors.files:
            file.entries = dict(sorted(file.entries.items()))


def _two_files(artifact: Artifact) -> None:
    """Split one file into two, scales apart from their weights."""
    with editing(artifact) as tensors:
        (whole,) = tensors.files
        names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
        scales = {n: e for n, e in whole.entries.items() if "_scale" in n or "norm" in n}
        rest = {n: e for n, e in whole.entries.items() if n not in scales}
        whole.path.unlink()
        tensors.files = [
            replace(whole, path=whole.path.with_name(name), entries=entries)
            for name, entries in zip(names, (rest, scales), strict=True)
        ]


def _defaults(artifact: Artifact) -> None:
    """Say what transformers says of every model it saves, none of which changes anything."""
    with artifact.json("config.json") as config:
        text = config.get("text_config", config)
        more = {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "pad_token_id": None,
            "bos_token_id": None,
            "hidden_act": "silu",
        }
        text |= {key: value for key, value in more.items() if key not in text}
        config["transformers_version"] = "5.24.0"
        config |= {key: config.pop(key) for key in sorted(config)}


def _resaved(artifact: Artifact) -> None:
    """Write every JSON file as another library would: indented by four, keys in order."""
    for path in sorted(artifact.path.glob("*.json")):
        value = json.loads(path.read_bytes())
        ordered = path.name != "tokenizer.json"
        artifact.write(path.name, json.dumps(value, indent=4, sort_keys=ordered))


def _generation(artifact: Artifact) -> None:
    with artifact.json("generation_config.json") as generation:
        generation["transformers_version"] = "5.24.0"


def _no_pairs(artifact: Artifact) -> None:
    """Leave out what tokenizer.json holds too."""
    for name in ("vocab.json", "merges.txt"):
        artifact.file(name).unlink()


def _theta_at_the_root_of_text(artifact: Artifact) -> None:
    """Write integers as floats, as some JSON writers do."""
    with artifact.json("config.json") as config:
        text = config.get("text_config", config)
        text["rope_parameters"]["rope_theta"] = float(text["rope_parameters"]["rope_theta"])


def _fused_again(artifact: Artifact) -> None:
    """Store the experts as the hub's BF16 files do."""
    with editing(artifact) as tensors:
        (file,) = tensors.files
        for layer in ("model.layers.0", "model.layers.1", "mtp.layers.0"):
            _fuse(file.entries, f"{layer}.mlp.experts.")


def _fuse(entries: Any, prefix: str) -> None:
    import numpy as np

    experts = range(4)
    both = [
        [entries.pop(f"{prefix}{e}.{p}.weight") for p in ("gate_proj", "up_proj")] for e in experts
    ]
    down = [entries.pop(f"{prefix}{e}.down_proj.weight") for e in experts]
    for name, parts, rows in (
        ("gate_up_proj", [part for pair in both for part in pair], 512),
        ("down_proj", down, 256),
    ):
        stacked = parts[0].renamed(prefix + name)
        stacked.info = replace(stacked.info, shape=(4, rows, 256))
        stacked.data = np.concatenate([part.data for part in parts])
        entries[prefix + name] = stacked


PLAIN = ("nano-fp8-block", "wide-fp8-channel", "moe-bf16-split")
FILES: dict[str, tuple[tuple[str, ...], Change]] = {
    "ignored layers": (("nano-fp8-block", "moe-fp8-block-hub"), _ignored_layers),
    "official list": (("nano-fp8-block-hub", "moe-fp8-block-hub"), _official_list),
    "list of patterns": (("wide-fp8-channel", "moe-fp8-channel"), _ignore_by_patterns),
    "index without metadata": (("nano-fp8-block", "wide-sharded"), _bare_index),
    "index with empty metadata": (("nano-fp8-block",), _empty_metadata),
    "index with a float": (("nano-fp8-block-hub",), _float_total),
    "no index": (PLAIN, _no_index),
    "no header metadata": (PLAIN, _no_header_metadata),
    "tensors by name": (PLAIN, _by_name),
    "two files": (("nano-fp8-block", "wide-fp8-channel"), _two_files),
    "defaults of transformers": (("nano-fp8-block-hub", "wide-bf16-split"), _defaults),
    "JSON saved again": (("nano-fp8-block", "moe-bf16-split"), _resaved),
    "generation config saved again": (("wide-bf16-split",), _generation),
    "no vocab.json": (("nano-bf16-split",), _no_pairs),
    "a float for an integer": (("wide-mixed",), _theta_at_the_root_of_text),
    "experts fused": (("moe-bf16-split",), _fused_again),
}


def _publish(artifact: Artifact) -> None:
    """Add what the hub shows: neither is read by an engine."""
    artifact.write("README.md", "---\nlicense: apache-2.0\n---\n# A model\n")
    artifact.write(".gitattributes", "*.safetensors filter=lfs diff=lfs merge=lfs -text\n")


AFTERWARDS: dict[str, tuple[tuple[str, ...], Change]] = {
    "a card added": (("nano-fp8-block", "wide-fp8-channel"), _publish),
}
