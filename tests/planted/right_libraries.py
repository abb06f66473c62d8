"""Right folders that other libraries make: compressed-tensors, transformers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quant.fp8.reference import block_amax
from tests.planted.artifact import RECEIPT, Workshop
from tests.planted.edit import INDEX

Make = Callable[[Workshop, Path], tuple[Path, Path]]


def makers() -> Iterator[tuple[str, str, Make]]:
    """Yield kind, name and what makes the artifact, of those that other libraries make."""
    for preset in ("FP8_DYNAMIC", "FP8_BLOCK"):
        yield "compressed-tensors", preset, partial(_compress, preset=preset)
    for model, form in (("cast", "text"), ("wide", "text"), ("wide", "vision"), ("moe", "vision")):
        yield "transformers", f"{form} of {model}", partial(_save, model=model, form=form)
    yield "transformers", "weights alone", partial(_save, model="cast", form="text", sides=False)
    yield "transformers", "shards", partial(_save, model="cast", form="text", shard="1MB")


def _compress(workshop: Workshop, folder: Path, preset: str) -> tuple[Path, Path]:
    """Compress with compressed-tensors, as llm-compressor does without calibration."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        apply_quantization_config,
        preset_name_to_scheme,
    )

    source = workshop.model("cast")
    model = _load(source, "text")
    scheme = preset_name_to_scheme(preset, ["Linear"])
    ignore = ["lm_head", "re:.*in_proj_[ab]$"]
    apply_quantization_config(
        model, QuantizationConfig(config_groups={preset: scheme}, ignore=ignore)
    )
    _set_scales(model)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder / "out")
    compressor.update_config(str(folder / "out"))
    _copy_sides(source, folder / "out")
    return folder / "out", source


def _set_scales(model: Any) -> None:
    from compressed_tensors.quantization.utils import calculate_qparams, is_module_quantized

    for module in model.modules():
        if is_module_quantized(module):
            weight, args = module.weight.detach(), module.quantization_scheme.weights
            block = (128, 128) if args.block_structure else (1, weight.shape[1])
            amax = block_amax(weight, block).to(weight.dtype)
            module.weight_scale.data.copy_(calculate_qparams(-amax, amax, args)[0])


def _load(source: Path, form: str) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForCausalLM if form == "text" else AutoModelForImageTextToText
    return kind.from_pretrained(source, dtype="auto")


def _in_bf16(source: Path, folder: Path) -> Path:
    """Return a copy of a model whose tensors are all BF16, as those of Qwen3.6 are."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    cast = {name: value.to(torch.bfloat16) for name, value in weights.items()}
    save_file(cast, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _save(
    workshop: Workshop,
    folder: Path,
    model: str,
    form: str,
    *,
    sides: bool = True,
    shard: str = "5GB",
) -> tuple[Path, Path]:
    """Load and save with transformers, which keeps neither MTP nor F32."""
    folder.mkdir()
    source = _in_bf16(workshop.model(model), folder / "source")
    _load(source, form).save_pretrained(folder / "out", max_shard_size=shard)
    if sides:
        _copy_sides(source, folder / "out")
    return folder / "out", source


def _copy_sides(source: Path, out: Path) -> None:
    """Put the source's tokenizer and the like beside the weights."""
    taken = {"config.json", RECEIPT, INDEX}
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja", ".txt") and path.name not in taken:
            shutil.copyfile(path, out / path.name)
