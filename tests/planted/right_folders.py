"""Right folders of others: other scales, lists and indexes; compressed-tensors; transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quant.fp8.reference import block_amax, expand
from tests.planted.artifact import RECEIPT, Artifact, Workshop
from tests.planted.edit import INDEX, Tensors, editing
from tests.planted.tensor_faults import original

Change = Callable[[Artifact], object]
Make = Callable[[Workshop, Path], tuple[Path, Path]]
BLOCK, LIST = "quantization_config", "modules_to_not_convert"


def changes() -> Iterator[tuple[str, str, str, Change]]:
    """Yield kind, name, base and change of each."""
    for name, (bases, change) in ENCODERS.items():
        for base in bases:
            yield "encoder", name, base, partial(_encode_all, how=change)
    for name, (bases, change) in FILES.items():
        for base in bases:
            yield "files", name, base, partial(_others, change=change)
    for name, (bases, change) in AFTERWARDS.items():
        for base in bases:
            yield "files", name, base, change


def _others(artifact: Artifact, change: Change) -> None:
    artifact.strip()
    change(artifact)


def _encode_all(artifact: Artifact, how: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """Encode every FP8 weight anew from the source's values."""
    artifact.strip()
    with editing(artifact) as tensors:
        for hub in _quantised(tensors):
            codes, scale = tensors.at(hub), tensors.scale(hub)
            assert scale is not None, f"{hub} is quantised"
            block = (
                (128, 128)
                if scale.info.shape[0] != codes.info.shape[0]
                else (1, codes.info.shape[1])
            )
            w = original(tensors, hub)
            new_codes, new_scale = how(w, block_amax(w, block), block)
            codes.view().copy_(new_codes)
            scale.info = replace(scale.info, dtype="F32" if new_scale.dtype == torch.float32
                                 else "F16" if new_scale.dtype == torch.float16 else "BF16")  # fmt: skip
            scale.data = new_scale.contiguous().view(torch.uint8).numpy().reshape(-1)
        _align(tensors)


def _quantised(tensors: Tensors) -> list[str]:
    stored = {name for name in tensors.names() if tensors.entry(name).info.dtype == "F8_E4M3"}
    prefixes = ("model.language_model.", "model.")
    hubs = []
    for name in stored:
        prefix = next((p for p in prefixes if name.startswith(p)), "")
        hubs.append(name.removeprefix(prefix))
    return sorted(hubs)


def _align(tensors: Tensors) -> None:
    widths = {"F32": 4, "F8_E4M3": 1}
    for file in tensors.files:
        ordered = sorted(file.entries.items(), key=lambda item: -widths.get(item[1].info.dtype, 2))
        file.entries = dict(ordered)


def _codes(w: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    ratio = w.float() / expand(scale.float(), block, w.shape)
    return ratio.clamp(-448, 448).to(torch.float8_e4m3fn)


def _float32(w: Tensor, amax: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    scale = amax.clamp(min=1e-12) / 448
    return _codes(w, scale, block), scale


def _rounded_after(w: Tensor, amax: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Round the scale to BF16 once the codes are made with the exact one."""
    codes, scale = _float32(w, amax, block)
    return codes, scale.to(torch.bfloat16)


def _rounded_before(w: Tensor, amax: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    scale = (amax.clamp(min=1e-12) / 448).to(torch.bfloat16)
    return _codes(w, scale, block), scale


def _in_bfloat16(w: Tensor, amax: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Divide in BF16, as tools do that never leave the model's type."""
    scale = (amax.to(torch.bfloat16) / 448).clamp(min=1e-12)
    ratio = w.to(torch.bfloat16) / expand(scale, block, w.shape)
    return ratio.clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _half_scales(w: Tensor, amax: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    scale = (amax / 448).to(torch.float16)
    return _codes(w, scale, block), scale


def _inverse(w: Tensor, amax: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Multiply by 448 / amax, as slime and DeepSeek's own tools do."""
    factor = 448 / amax.clamp(min=1e-4)
    ratio = w.float() * expand(factor, block, w.shape)
    return ratio.clamp(-448, 448).to(torch.float8_e4m3fn), 1 / factor


def _powers(w: Tensor, amax: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Take the next power of two above, in float32: scales for UE8M0."""
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448)))
    return _codes(w, scale, block), scale


BLOCKS = ("nano-fp8-block", "moe-fp8-block-hub", "wide-fp8-block")
ENCODERS: dict[str, tuple[tuple[str, ...], Any]] = {
    "float32 scales": (("nano-fp8-block", "moe-fp8-block-hub", "wide-fp8-channel"), _float32),
    "scales rounded after": ((*BLOCKS, "wide-fp8-channel"), _rounded_after),
    "scales rounded before": ((*BLOCKS, "moe-fp8-channel"), _rounded_before),
    "division in BF16": (("nano-fp8-block", "wide-fp8-channel"), _in_bfloat16),
    "half scales": (("nano-fp8-block",), _half_scales),
    "inverse": (("moe-fp8-block", "nano-fp8-block-hub"), _inverse),
    "powers of two": (("wide-fp8-block",), _powers),
}


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
    patterns = ("embed_tokens$", "linear_attn\\.in_proj_[ab]$", "conv1d$", "mtp\\.fc$",
                "mlp\\.gate$", "shared_expert_gate$")  # fmt: skip
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
        _align(tensors)


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
            "attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
            "use_cache": True, "pad_token_id": None, "bos_token_id": None, "hidden_act": "silu",
        }  # fmt: skip
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
        _align(tensors)


def _fuse(entries: Any, prefix: str) -> None:
    import numpy as np

    experts = range(4)
    both = [[entries.pop(f"{prefix}{e}.{p}.weight") for p in ("gate_proj", "up_proj")]
            for e in experts]  # fmt: skip
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
}  # fmt: skip


def _publish(artifact: Artifact) -> None:
    """Add what the hub shows: neither is read by an engine."""
    artifact.write("README.md", "---\nlicense: apache-2.0\n---\n# A model\n")
    artifact.write(".gitattributes", "*.safetensors filter=lfs diff=lfs merge=lfs -text\n")


AFTERWARDS: dict[str, tuple[tuple[str, ...], Change]] = {
    "a card added": (("nano-fp8-block", "wide-fp8-channel"), _publish),
}


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
