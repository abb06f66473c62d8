"""The bundled trained model with one thing changed beside its tensors, or as an embedding model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.checkpoints import hub_config, make_weights, write_checkpoint

NANO = Path(__file__).parent / "data" / "nano-dense"
PREFIX = "model.language_model."
TOOL = "{%- for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{%- endfor %}"
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {
        "idx": 2,
        "name": "2",
        "path": "2_Normalize",
        "type": "sentence_transformers.models.Normalize",
    },
]
LAST = {"word_embedding_dimension": 128, "pooling_mode_lasttoken": True}
PROMPTS = {"prompts": {"query": "Find: ", "document": ""}, "similarity_fn_name": "cosine"}


def nano(
    folder: Path,
    *,
    text: Mapping[str, Any] | None = None,
    root: Mapping[str, Any] | None = None,
    files: Mapping[str, Any] | None = None,
    without: Iterable[str] = (),
) -> Path:
    """Copy the bundled model.

    text, root  fields of config.json to set, inside text_config and beside it; None removes one
    files       side files to write: bytes and text as they are, all else as JSON
    """
    shutil.copytree(NANO, folder, ignore=shutil.ignore_patterns(*without))
    config = json.loads((NANO / "config.json").read_text())
    config["text_config"] = _set(config["text_config"], text or {})
    write(folder, {"config.json": _set(config, root or {})} | dict(files or {}))
    return folder


def half(folder: Path) -> Path:
    """Write the bundled model without its first two layers: one of each kind is left."""
    kinds = ["linear_attention", "full_attention"]
    text = {"num_hidden_layers": 2, "layer_types": kinds, "full_attention_interval": 2}
    nano(folder, text=text, without=["model.*"])
    (stored,) = NANO.glob("*.safetensors")
    left = {}
    for name, value in load_file(stored).items():
        first, layers, rest = name.partition(f"{PREFIX}layers.")
        i, _, rest = rest.partition(".")
        if not layers or int(i) >= 2:
            left[f"{PREFIX}layers.{int(i) - 2}.{rest}" if layers else first] = value
    save_file(left, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _set(part: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in {**part, **changes}.items() if value is not None}


def write(folder: Path, files: Mapping[str, Any]) -> None:
    """Write files, some of them in folders of their own."""
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        content = value if isinstance(value, str | bytes) else json.dumps(value, indent=1)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def beside(**changes: Any) -> dict[str, Any]:
    """Return tokenizer_config.json with some fields changed, as a file to write."""
    config = json.loads((NANO / "tokenizer_config.json").read_text())
    return {"tokenizer_config.json": config | changes}


def embedder(folder: Path, *, pooling: Any = LAST, modules: Any = MODULES) -> Path:
    """Write the text model alone under its base class, with sentence-transformers' files."""
    whole = json.loads((NANO / "config.json").read_text())["text_config"]
    config = whole | {"architectures": ["Qwen3_5TextModel"], "mtp_num_hidden_layers": 0}
    (stored,) = NANO.glob("*.safetensors")
    weights = load_file(stored)
    named = {k.removeprefix(PREFIX): v for k, v in weights.items() if k.startswith(PREFIX)}
    shutil.copytree(NANO, folder, ignore=shutil.ignore_patterns("model.*", "*processor*"))
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    sides = {"modules.json": modules, "1_Pooling/config.json": pooling,
             "config_sentence_transformers.json": PROMPTS}  # fmt: skip
    write(folder, {"config.json": config} | sides)
    return folder


def base_model(folder: Path, *, moe: bool = False, nested: bool = False, **sizes: Any) -> Path:
    """Write a generated model under a base class: no head, names as that class has them."""
    config = hub_config(moe=moe, **sizes)
    weights = make_weights(config)
    kind = "Qwen3_5Moe" if moe else "Qwen3_5"
    if nested:
        named = {k.removeprefix("model."): v for k, v in weights.items() if k.startswith("model.")}
        return write_checkpoint(folder, config | {"architectures": [f"{kind}Model"]}, named)
    named = {k.removeprefix(PREFIX): v for k, v in weights.items() if k.startswith(PREFIX)}
    text = config["text_config"] | {"architectures": [f"{kind}TextModel"]}
    return write_checkpoint(folder, text | {"mtp_num_hidden_layers": 0}, named)
