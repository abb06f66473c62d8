"""Right tensors of others: in wider types, in other files and headers; of FP8 and of F16 models."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from formats.safetensors.file import TORCH_NAMES, torch_dtype
from quant.ggml import codec
from qwen35_convert import api
from qwen35_convert.recipe.recipe import read_recipe
from tests.planted.artifact import RECEIPT, Artifact, Workshop, find_base
from tests.planted.edit import INDEX, Tensors, editing, read_file, reading

Change = Callable[[Artifact], object]
Make = Callable[[Workshop, Path], tuple[Path, Path]]
UP = "layers.0.mlp.up_proj.weight"


def changes() -> Iterator[tuple[str, str, str, Change]]:
    """Yield kind, name, base and change of each."""
    for name, (bases, change) in TENSORS.items():
        for base in bases:
            yield "tensors", name, base, partial(_others, change=change)


def makers() -> Iterator[tuple[str, str, Make]]:
    """Yield kind, name and what makes the artifact."""
    yield "tensors", "FP8 to F32", _to_f32
    for mix in ("q8_0", "q4_k_m", "q6_k", "f16"):
        yield "tensors", f"FP8 to {mix} by way of F32", partial(_to_gguf, mix=mix)
    yield "tensors", "F16 norms in a file", _of_f16


def _others(artifact: Artifact, change: Change) -> None:
    artifact.strip()
    change(artifact)


def _widen(tensors: Tensors, ending: str) -> None:
    """Store what is kept in F32, as trainers do that must not lose small steps."""
    for file in tensors.files:
        for name, entry in file.entries.items():
            if name.endswith(ending) and entry.info.dtype == "BF16" and "_scale" not in name:
                entry.put(entry.view().float())


def _wide_norms(artifact: Artifact) -> None:
    with editing(artifact) as tensors:
        _widen(tensors, "norm.weight")


def _all_wide(artifact: Artifact) -> None:
    with editing(artifact) as tensors:
        _widen(tensors, "")


def _padded_header(artifact: Artifact) -> None:
    """Let the data begin at a page, as writers do that map it."""
    for path in artifact.tensor_files():
        content = path.read_bytes()
        stop = 8 + struct.unpack("<Q", content[:8])[0]
        header = content[8:stop] + b" " * (-stop % 4096)
        artifact.write(path.name, struct.pack("<Q", len(header)) + header + content[stop:])


def _more_metadata(artifact: Artifact) -> None:
    with editing(artifact) as tensors:
        for file in tensors.files:
            file.metadata |= {"producer": "somebody", "total_parameters": "12345"}


def _mtp_apart(artifact: Artifact) -> None:
    """Copy MTP into a file of its own, as tools do whose model class has none."""
    with editing(artifact) as tensors:
        (whole,) = tensors.files
        apart = {name: one for name, one in whole.entries.items() if name.startswith("mtp.")}
        whole.entries = {n: one for n, one in whole.entries.items() if n not in apart}
        path = whole.path.with_name("model_extra_tensors.safetensors")
        tensors.files.append(replace(whole, path=path, entries=apart))


def _without_mtp(artifact: Artifact) -> None:
    with editing(artifact) as tensors:
        for file in tensors.files:
            file.entries = {n: e for n, e in file.entries.items() if not n.startswith("mtp.")}


def _other_exp(artifact: Artifact) -> None:
    """Let -exp(A_log) be two ulp off, as that of a faster library is."""
    with editing(artifact) as tensors:
        decay = tensors.entry("blk.0.ssm_a")
        decay.view().view(torch.int32).add_(2)


PLAIN = ("nano-fp8-block", "wide-fp8-channel")
TENSORS: dict[str, tuple[tuple[str, ...], Change]] = {
    "norms in F32": (("nano-fp8-block", "wide-bf16-split", "moe-fp8-block-hub"), _wide_norms),
    "all in F32": (("nano-bf16-split", "moe-bf16-split", "wide-fp8-channel"), _all_wide),
    "padded header": (PLAIN, _padded_header),
    "more metadata": (PLAIN, _more_metadata),
    "mtp in its own file": (PLAIN, _mtp_apart),
    "another library's exp": (("wide-bf16", "moe-q4_k_m"), _other_exp),
    "without mtp": (("nano-fp8-block", "moe-fp8-channel"), _without_mtp),
}


def _fp8(workshop: Workshop, folder: Path) -> Artifact:
    """Return a checkpoint whose codes times scales do not fit into BF16."""
    return workshop.place(find_base("wide-fp8-channel"), folder)


def _to_f32(workshop: Workshop, folder: Path) -> tuple[Path, Path]:
    """Dequantise in F32 and keep that."""
    source, out = _fp8(workshop, folder), folder / "out"
    api.convert(source.path, out, read_recipe("bf16-split"))
    (out / RECEIPT).unlink()
    exact, file = reading(source), read_file(out / "model.safetensors")
    for name, entry in file.entries.items():
        entry.put(exact.values(name.removeprefix("model.")).float())
    file.path.write_bytes(file.content())
    index = json.loads((out / INDEX).read_bytes())
    index["metadata"]["total_size"] = sum(len(entry.data) for entry in file.entries.values())
    (out / INDEX).write_text(json.dumps(index))
    return out, source.path


def _to_gguf(workshop: Workshop, folder: Path, mix: str) -> tuple[Path, Path]:
    """Encode an MLP from codes times scales in F32, as llama.cpp's converter has them."""
    source, out = _fp8(workshop, folder), folder / "theirs.gguf"
    recipe = read_recipe("gguf-q8_0", (f"quantize.scheme={mix}", "quantize.mix=llama.cpp"))
    api.convert(source.path, out, recipe)
    (folder / "theirs.gguf.receipt.json").unlink()
    exact, file = reading(source).values(UP).float(), read_file(out)
    entry = file.entries["blk.0.ffn_up.weight"]
    if entry.info.dtype in TORCH_NAMES:
        entry.put(exact.to(torch_dtype(entry.info.dtype)))
    else:
        entry.data = codec.encode(entry.info.dtype, exact).numpy().reshape(-1).copy()
    out.write_bytes(file.content())
    return out, source.path


def _of_f16(workshop: Workshop, folder: Path) -> tuple[Path, Path]:
    """Add the norms' 1 in F16, as llama.cpp's converter does where a model is F16."""
    source, out = folder / "source", folder / "theirs.gguf"
    shutil.copytree(workshop.model("wide"), source)
    weights = load_file(source / "model.safetensors")
    half = {n: w.half() if w.dtype == torch.bfloat16 else w for n, w in weights.items()}
    save_file(half, source / "model.safetensors", metadata={"format": "pt"})
    api.convert(source, out, read_recipe("gguf-q8_0"))
    (folder / "theirs.gguf.receipt.json").unlink()
    file = read_file(out)
    for name, hub in (("output_norm", "norm"), ("blk.0.attn_norm", "layers.0.input_layernorm")):
        norm = half[f"model.language_model.{hub}.weight"]
        file.entries[f"{name}.weight"].put((norm + 1).float())
    out.write_bytes(file.content())
    return out, source
