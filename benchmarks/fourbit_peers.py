"""llm-compressor, AutoRound and ModelOpt: what users take in place of ours, on the same linears.

    python -m benchmarks.fourbit_peers PEER SCHEME METHOD SOURCE IDS OUT

One process quantises a source (a folder) with one peer, calibrated on token ids ([texts, length], a
tensor in the file IDS), and writes to OUT the float32 values of the weights it quantised, as that
peer's own decompressor gives them; names are those of `benchmarks.fourbit_score`.

A peer's settings are its defaults, but for what keeps it on the same linears, and for what it needs
to run at all without a GPU:

    llm-compressor  pins memory always, which needs a GPU; asks for a processor, which needs images
    auto-round      takes a source with image settings for one to be given images; turns a mask of
                    ones into one that attention layers do not take, so it gets none; torch.compile
                    takes longer than all the rest; NVFP4 is exported with scales of its inputs
    modelopt        rounds to NVFP4 and MXFP4 on a GPU only; its tensor class for files does NVFP4
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.fourbit_score import linears, load_text_model

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    Weights = dict[str, Tensor]

KEPT = ("in_proj_a", "in_proj_b", "gate", "shared_expert_gate")
IGNORED = ["lm_head", *(f"re:.*\\.{name}$" for name in KEPT)]
G32 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}


@dataclass(frozen=True)
class Job:
    """What a peer shall do; ids are [texts, length]."""

    scheme: str
    method: str
    source: Path
    ids: Tensor


COMPRESSOR: dict[str, Any] = {
    "nvfp4a16": {"scheme": "NVFP4A16"}, "mxfp4a16": {"scheme": "MXFP4A16"},
    "int4": {"scheme": "W4A16"}, "int8": {"scheme": "W8A8"},
    "int4-g32": {"config_groups": {"group_0": {"targets": ["Linear"], "weights": G32}}},
}  # fmt: skip


def llm_compressor(job: Job) -> Weights:
    """Quantise to the nearest codes, or by GPTQ."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoTokenizer

    torch.Tensor.pin_memory = lambda self, *_: self
    settings = {"targets": "Linear", "ignore": IGNORED} | COMPRESSOR[job.scheme]
    gptq = job.method == "gptq"
    modifier = (GPTQModifier if gptq else QuantizationModifier)(**settings)
    texts = {"dataset": _loader(job.ids), "num_calibration_samples": len(job.ids)} if gptq else {}
    model = load_text_model(job.source, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(job.source)
    with TemporaryDirectory() as out:
        oneshot(model=model, processor=tokenizer, recipe=[modifier], output_dir=out, **texts)
        return _decompressed(Path(out))


def _loader(ids: Tensor) -> Any:
    from torch.utils.data import DataLoader

    return DataLoader([{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids])


def _decompressed(folder: Path) -> Weights:
    """Return the values of a folder's weights by compressed-tensors."""
    import json

    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    scheme = QuantizationScheme(**group)
    compressor = BaseCompressor.get_value_from_registry(group["format"] or config["format"])
    modules: dict[str, Weights] = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            module, _, part = name.rpartition(".")
            modules.setdefault(module.replace("language_model.", ""), {})[part] = tensor
    return {
        module: compressor.decompress(parts, scheme)["weight"].float()
        for module, parts in modules.items()
        if "weight_scale" in parts and module.startswith("model.layers.")
    }


ROUND: dict[str, dict[str, Any]] = {
    "nvfp4a16": {"scheme": "NVFP4"},
    "mxfp4a16": {"scheme": "MXFP4", "act_bits": 16},
    "int4": {"scheme": "W4A16"}, "int8": {"scheme": "INT8"},
    "int4-g32": {"scheme": "W4A16", "group_size": 32, "sym": False},
}  # fmt: skip


def auto_round(job: Job) -> Weights:
    """Quantise to the nearest codes of searched scales, or learn roundings: `tuned-N`, N steps."""
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    with TemporaryDirectory() as text_only:
        load_text_model(job.source, torch.bfloat16).save_pretrained(text_only)
        tokenizer = AutoTokenizer.from_pretrained(job.source)
        tokenizer.save_pretrained(text_only)
        model = load_text_model(Path(text_only), torch.float32)
        own = {name: weight.clone() for name, weight in linears(model).items()}
        peer = AutoRound(
            model, tokenizer, iters=int(job.method.partition("-")[2] or 0),
            dataset=[{"input_ids": x[None], "attention_mask": None} for x in job.ids],
            nsamples=len(job.ids), seqlen=job.ids.shape[1], device_map="cpu",
            ignore_layers="lm_head,in_proj_a,in_proj_b", enable_torch_compile=False,
            **ROUND[job.scheme],
        )  # fmt: skip
        if job.scheme == "nvfp4a16":
            peer.quantize_and_save(output_dir=text_only + "/made", format="llm_compressor")
            (config,) = Path(text_only, "made").rglob("config.json")
            return _decompressed(config.parent)
        return _changed(own, peer.quantize()[0])


def _changed(own: Mapping[str, Tensor], model: Any) -> Weights:
    """Return what is no longer as it was."""
    found = linears(model)
    return {
        name: found[name].float().contiguous()
        for name, weight in own.items()
        if not torch.equal(found[name].float(), weight)
    }


def modelopt(job: Job) -> Weights:
    """Quantise to the nearest codes; of INT4 also with scaled columns (`awq`)."""
    if job.scheme == "nvfp4a16":
        return _modelopt_nvfp4(linears(load_text_model(job.source, torch.bfloat16)))
    import modelopt.torch.quantization as mtq

    names = {"int4": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG", "int8": "INT8_WEIGHT_ONLY_CFG"}
    config = mtq.INT4_AWQ_CFG if job.method == "awq" else getattr(mtq, names[job.scheme])
    model = load_text_model(job.source, torch.float32)
    own = {name: weight.clone() for name, weight in linears(model).items()}
    mtq.quantize(model, config, lambda m: [m(x[None]) for x in job.ids])
    scales = {
        name: module.input_quantizer.pre_quant_scale
        for name, module in model.named_modules()
        if hasattr(module, "input_quantizer") and module.input_quantizer.pre_quant_scale is not None
    }
    mtq.fold_weight(model)
    found = _changed(own, model)
    return {name: w * scales[name] if name in scales else w for name, w in found.items()}


def _modelopt_nvfp4(weights: Weights) -> Weights:
    """Round by its tensor class, one scale for each matrix that engines fuse, as it exports."""
    from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

    fused = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv") | dict.fromkeys(
        ("gate_proj", "up_proj"), "gate_up"
    )
    fused |= dict.fromkeys(("in_proj_qkv", "in_proj_z"), "in_proj")
    place = {n: (n.rpartition(".")[0], fused.get(n.rpartition(".")[2], n)) for n in weights}
    most: dict[tuple[str, str], Tensor] = {}
    taken = [name for name in weights if name.rpartition(".")[2] not in KEPT]
    for name in taken:
        amax = weights[name].float().abs().max()
        most[place[name]] = amax.maximum(most.get(place[name], amax))
    found: Weights = {}
    for name in taken:
        whole = most[place[name]] / (6 * 448)
        codes, scale, whole = NVFP4QTensor.quantize(weights[name].clone(), 16, None, whole)
        sizes = {"scale": scale, "double_scale": whole, "block_sizes": {-1: 16}}
        found[name] = codes.dequantize(dtype=torch.float32, **sizes)
    return found


PEERS: dict[str, Callable[[Job], Weights]] = {
    "llm-compressor": llm_compressor,
    "auto-round": auto_round,
    "modelopt": modelopt,
}


def main() -> None:
    """Run one peer."""
    peer, scheme, method, source, ids, out = sys.argv[1:]
    weights = PEERS[peer](Job(scheme, method, Path(source), load_file(ids)["ids"]))
    save_file({name: w.contiguous() for name, w in weights.items()}, out)


if __name__ == "__main__":
    main()
