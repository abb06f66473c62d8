"""Right vision files whose keys say the same in another way, or whose weights have another type."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from formats.gguf.header import Kv
from tests.planted.artifact import Artifact
from tests.planted.edit import TensorFile, read_file

Pairs = dict[str, Kv]
VISION = "mmproj-model.gguf"
OF_A_TOOL = (
    Kv("mradermacher.quantize_version", "string", "2"),
    Kv("mradermacher.quantized_by", "string", "mradermacher"),
    Kv("mradermacher.quantized_at", "string", "2026-10-02T04:11:09+02:00"),
    Kv("mradermacher.convert_type", "string", "hf"),
    Kv("general.url", "string", "https://huggingface.co/mradermacher/Model-GGUF"),
    Kv("general.source.url", "string", "https://huggingface.co/somebody/Model"),
    Kv("general.base_model.0.repo_url", "string", "https://huggingface.co/Qwen/Qwen3.5-0.8B"),
    Kv("general.dataset.count", "uint32", 1),
    Kv("general.dataset.0.name", "string", "Text"),
    Kv("general.license.link", "string", "https://huggingface.co/Qwen/Qwen3.5-0.8B"),
    Kv("general.languages", "array[string]", ["en", "zh"]),
    Kv("quantize.imatrix.file", "string", "imatrix_unsloth.gguf"),
    Kv("quantize.imatrix.dataset", "string", "unsloth_calibration.txt"),
    Kv("quantize.imatrix.entries_count", "uint32", 30),
    Kv("quantize.imatrix.chunks_count", "uint32", 8),
)


def of_vision(artifact: Artifact, change: Callable[[TensorFile, Pairs], object]) -> None:
    """Change the vision file, as anybody's."""
    artifact.strip()
    file = read_file(artifact.file(VISION))
    pairs = {pair.key: pair for pair in file.pairs}
    change(file, pairs)
    file.pairs = list(pairs.values())
    artifact.write(VISION, file.content())


def _with(*pairs: Kv) -> Callable[[TensorFile, Pairs], object]:
    return lambda _file, known: known.update({pair.key: pair for pair in pairs})


def _bare(_file: TensorFile, known: Pairs) -> None:
    """Leave out what newer writers add, and every record."""
    for key in list(known):
        if key.startswith("general.sampling.") or key in UNREAD:
            del known[key]


UNREAD = (
    "general.name",
    "general.size_label",
    "general.type",
    "general.file_type",
    "general.quantization_version",
    "clip.vision.is_deepstack_layers",
)


def _projector(_file: TensorFile, known: Pairs) -> None:
    value = known.pop("clip.projector_type").value
    known["clip.vision.projector_type"] = Kv("clip.vision.projector_type", "string", value)


def _cast(file: TensorFile, known: Pairs, dtype: torch.dtype, number: int) -> None:
    """Store every weight in another plain type."""
    for entry in file.entries.values():
        if entry.info.dtype == "BF16" or "patch_embd.weight" in entry.info.name:
            entry.put(entry.view().to(dtype))
    if any(entry.info.dtype == "Q8_0" for entry in file.entries.values()):
        return
    known["general.file_type"] = Kv("general.file_type", "uint32", number)


VISIONS: dict[str, Callable[[TensorFile, Pairs], object]] = {
    "without what newer writers add": _bare,
    "projector under the other key": _projector,
    "sizes of images stated": _with(
        Kv("clip.vision.image_min_pixels", "uint32", 65536),
        Kv("clip.vision.image_max_pixels", "uint32", 16777216),
    ),
    "other encoders denied": _with(
        Kv("clip.has_audio_encoder", "bool", value=False),
        Kv("clip.use_silu", "bool", value=False),
        Kv("clip.vision.n_wa_pattern", "uint32", 0),
    ),
    "about the uploader": _with(*OF_A_TOOL),
    "in F32": partial(_cast, dtype=torch.float32, number=0),
    "in F16": partial(_cast, dtype=torch.float16, number=1),
}
