"""Adapters: what LoRA trainers save, which is no model but a change of one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from formats.errors import FormatError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (ADAPTER_CONFIG, ADAPTER_FILE)
# PEFT's adapter_model.safetensors, MLX's adapters.safetensors and 0000100_adapters.safetensors
ADAPTER = re.compile(r"(?:\d+_)?adapters?(?:_model)?(?:[-.].*)?\.(?:safetensors|bin)")
CONVERT = "qwen35 convert {folder} --base {base} -o OUT merges it as it is read"
MERGE = (
    "merge it, and convert what that writes:\n"
    '        python -c "from peft import AutoPeftModelForCausalLM as M; '
    "M.from_pretrained('{folder}').merge_and_unload().save_pretrained('merged')\"\n"
    "        and copy the base model's tokenizer files into `merged`"
)


def adapters(names: Iterable[str]) -> list[str]:
    """Return the files of adapters among these."""
    return sorted(name for name in names if ADAPTER.fullmatch(name))


def base_of(raw: dict[str, Any], unnamed: str = "a model that it does not name") -> str:
    """Return the model that an adapter_config.json says the adapter changes."""
    base = raw.get("base_model_name_or_path") or raw.get("model")
    return base[:200] if isinstance(base, str) and base.isprintable() else unnamed


def adapter_note(files: Iterable[str], raw: dict[str, Any]) -> str:
    """Say that an adapter beside a whole model is not used."""
    named = ", ".join(files) or ADAPTER_CONFIG
    return (
        f"{named} is an adapter (LoRA) of {base_of(raw)}, and is not used: the artifact is the "
        "model without it. Merge it first if it is wanted"
    )


def no_model(folder: str, raw: dict[str, Any]) -> FormatError:
    """Return the refusal of an adapter that is given as a model."""
    fix = CONVERT if raw.get("peft_type") == "LORA" else MERGE
    return FormatError(
        folder,
        f"is an adapter (LoRA) of {base_of(raw)}",
        "a whole model",
        fix.format(folder=folder, base=base_of(raw, "MODEL")),
    )
