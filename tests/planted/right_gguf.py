"""Right GGUF files of others: llama.cpp's converter, its quantiser, gguf-split, older and newer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from formats.gguf.header import Kv
from formats.safetensors.file import TORCH_NAMES
from qwen35_convert import api
from qwen35_convert.recipe.recipe import build_recipe
from tests.planted.artifact import Artifact, Base, Workshop
from tests.planted.edit import Entry, TensorFile, Tensors, editing, read_file, reading

Change = Callable[[Artifact], object]
Make = Callable[[Workshop, Path], tuple[Path, Path]]


def changes() -> Iterator[tuple[str, str, str, Change]]:
    """Yield kind, name, base and change of each."""
    for name, (bases, change) in FILES.items():
        for base in bases:
            yield "gguf", name, base, partial(_others, change=change)


def makers() -> Iterator[tuple[str, str, Make]]:
    """Yield kind, name and what makes the artifact."""
    for model, mixes in QUANTISED.items():
        for mix in mixes:
            yield "llama.cpp", f"{mix} of {model}", partial(_quantise, model=model, mix=mix)
    for mix in ("f32", "bf16", "f16", "q8_0"):
        yield "llama.cpp", f"converter {mix}", partial(_convert, mix=mix, mtp="keep")
    yield "llama.cpp", "converter without mtp", partial(_convert, mix="q8_0", mtp="drop")
    yield "llama.cpp", "imatrix", partial(_quantise, model="wide", mix="q4_k_m", weighed=True)
    yield "llama.cpp", "imatrix iq3", partial(_quantise, model="wide", mix="iq3_s", weighed=True)
    yield "llama.cpp", "split", _split


def _others(artifact: Artifact, change: Change) -> None:
    artifact.strip()
    change(artifact)


QUANTISED = {
    "wide": ("q8_0", "q6_k", "q5_k_m", "q4_k_m", "iq4_xs", "iq3_s", "q4_0", "q5_0"),
    "moe": ("q8_0", "q4_k_m", "mxfp4_moe", "q6_k"),
    "nano": ("q8_0", "q4_k_m"),
}


def _theirs(workshop: Workshop, folder: Path, model: str, mix: str, mtp: str) -> TensorFile:
    """Return a file with the types that llama.cpp chooses.

    Keys and types are those of its converter and quantiser (tests/test_gguf_record.py and
    tests/quant/mix hold ours to theirs).
    """
    folder.mkdir(exist_ok=True)
    recipe = build_recipe(
        {"mtp": mtp, "quantize": {"scheme": mix, "mix": "llama.cpp"}, "export": {"format": "gguf"}}
    )
    options = api.RunOptions(workers=1, verify=False)
    api.convert(workshop.model(model), folder / "theirs.gguf", recipe, options=options)
    (folder / "theirs.gguf.receipt.json").unlink()
    return read_file(folder / "theirs.gguf")


def _convert(workshop: Workshop, folder: Path, mix: str, mtp: str) -> tuple[Path, Path]:
    """Write what `convert_hf_to_gguf.py` does: its keys, its bytes, its order of tensors."""
    file = _theirs(workshop, folder, "nano", mix, mtp)
    file.entries = dict(sorted(file.entries.items()))
    file.path.write_bytes(file.content())
    return file.path, workshop.model("nano")


def _quantise(
    workshop: Workshop, folder: Path, model: str, mix: str, *, weighed: bool = False
) -> tuple[Path, Path]:
    """Encode every tensor with ggml's own code."""
    file = _theirs(workshop, folder, model, mix, "keep")
    exact = reading(workshop.open(Base(model, "bf16")))
    for name, entry in file.entries.items():
        if entry.info.dtype not in TORCH_NAMES:
            entry.data = _ggml(exact.entry(name), entry, weighed=weighed)
    if weighed:
        file.pairs += WEIGHED
    file.path.write_bytes(file.content())
    return file.path, workshop.model(model)


def _ggml(exact: Entry, entry: Entry, *, weighed: bool) -> np.ndarray:
    import libgguf
    from gguf import GGMLQuantizationType

    columns = entry.info.shape[-1]
    values = exact.view().float().reshape(-1, columns).numpy()
    importance = np.linspace(0.5, 2, columns, dtype=np.float32) if weighed else None
    kind = GGMLQuantizationType[entry.info.dtype].value
    return (
        np.ascontiguousarray(libgguf.quantize_rows(values, kind, imatrix=importance))
        .reshape(-1)
        .view(np.uint8)
    )


WEIGHED = [
    Kv("quantize.imatrix.file", "string", "imatrix.gguf"),
    Kv("quantize.imatrix.dataset", "string", "calibration.txt"),
    Kv("quantize.imatrix.entries_count", "uint32", 30),
    Kv("quantize.imatrix.chunks_count", "uint32", 8),
]


def _split(workshop: Workshop, folder: Path) -> tuple[Path, Path]:
    """Split as gguf-split does by default: the first file has the metadata and no tensor less."""
    whole = _theirs(workshop, folder, "wide", "q8_0", "keep")
    names = list(whole.entries)
    packs = [names[i : i + 20] for i in range(0, len(names), 20)]
    whole.path.unlink()
    for index, pack in enumerate(packs):
        pairs = [
            Kv("split.no", "uint16", index),
            Kv("split.count", "uint16", len(packs)),
            Kv("split.tensors.count", "int32", len(names)),
        ]
        path = folder / f"theirs-{index + 1:05d}-of-{len(packs):05d}.gguf"
        entries = {name: whole.entries[name] for name in pack}
        part = TensorFile(path, entries, pairs=[*(whole.pairs if index == 0 else []), *pairs])
        path.write_bytes(part.content())
    return folder / f"theirs-00001-of-{len(packs):05d}.gguf", workshop.model("wide")


def _order(artifact: Artifact) -> None:
    with editing(artifact) as tensors:
        for file in tensors.files:
            file.entries = dict(sorted(file.entries.items()))


def _key_order(artifact: Artifact) -> None:
    with editing(artifact) as tensors:
        tensors.pairs()[1:] = sorted(tensors.pairs()[1:], key=lambda pair: pair.key)


def _without(key: str) -> Change:
    def change(artifact: Artifact) -> None:
        with editing(artifact) as tensors:
            kept = [pair for pair in tensors.pairs() if not pair.key.endswith(key)]
            assert len(kept) < len(tensors.pairs()), f"there is no {key}"
            tensors.files[0].pairs = kept

    return change


def _with(*pairs: Kv) -> Change:
    def change(artifact: Artifact) -> None:
        with editing(artifact) as tensors:
            tensors.pairs().extend(pairs)

    return change


def _renamed(artifact: Artifact) -> None:
    """Name the model as its uploader does."""
    with editing(artifact) as tensors:
        for i, pair in enumerate(tensors.pairs()):
            if pair.key == "general.name":
                tensors.pairs()[i] = replace(pair, value="Qwen3.5-0.8B-GGUF")


def _no_vision(artifact: Artifact) -> None:
    artifact.file("mmproj-model.gguf").unlink()


def _vision_in_f16(artifact: Artifact) -> None:
    """Store the tower's matrices in F16, as llama.cpp's converter does by default."""
    file = read_file(artifact.file("mmproj-model.gguf"))
    for entry in file.entries.values():
        if entry.info.dtype == "BF16":
            entry.put(entry.view().to(torch.float16))
    file.pairs = [
        replace(pair, value=1) if pair.key == "general.file_type" else pair for pair in file.pairs
    ]
    artifact.write("mmproj-model.gguf", file.content())


def _one_type_up(artifact: Artifact) -> None:
    """Keep one tensor in F16, as mixes with exceptions do."""
    with editing(artifact) as tensors:
        _widen(tensors, "layers.0.linear_attn.out_proj.weight")


def _widen(tensors: Tensors, hub: str) -> None:
    entry = tensors.at(hub)
    exact = reading(tensors.artifact.workshop.open(Base(tensors.artifact.base.model, "bf16")))
    entry.put(exact.entry(entry.info.name).view().float().to(torch.float16))


ABOUT = (
    Kv("general.quantized_by", "string", "Somebody"),
    Kv("general.repo_url", "string", "https://huggingface.co/somebody"),
    Kv("general.license", "string", "apache-2.0"),
    Kv("general.tags", "array[string]", ["text-generation"]),
    Kv("general.base_model.count", "uint32", 1),
    Kv("general.base_model.0.name", "string", "Qwen3.5 0.8B"),
    Kv("general.basename", "string", "Qwen3.5"),
)
FILES: dict[str, tuple[tuple[str, ...], Change]] = {
    "tensors by name": (("nano-q8_0", "wide-q4_k_m", "moe-mxfp4_moe"), _order),
    "keys by name": (("nano-q8_0",), _key_order),
    "before recurrent_layers": (("nano-q8_0", "moe-q4_k_m"), _without("recurrent_layers")),
    "without sampling": (("nano-q8_0",), _without("general.sampling.temp")),
    "without a size label": (("wide-bf16",), _without("general.size_label")),
    "without add_bos": (("wide-q6_k",), _without("add_bos_token")),
    "about the uploader": (("wide-q4_k_m",), _with(*ABOUT)),
    "another name": (("nano-q8_0",), _renamed),
    "text alone": (("nano-mmproj",), _no_vision),
    "vision in F16": (("wide-mmproj-bf16",), _vision_in_f16),
    "a tensor in F16": (("wide-q4_k_m", "wide-q6_k"), _one_type_up),
}
