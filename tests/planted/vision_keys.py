"""What is planted into the keys of an mmproj file."""

from __future__ import annotations

from typing import Any

from formats.gguf.header import Kv

KEYS: dict[str, tuple[str, Any]] = {
    "image-mean": ("clip.vision.image_mean", [0.48, 0.46, 0.41]),
    "image-std": ("clip.vision.image_std", [0.27, 0.26, 0.28]),
    "image-mean-of-bytes": ("clip.vision.image_mean", lambda mean: [255 * x for x in mean]),
    "image-std-lost": ("clip.vision.image_std", [1.0, 1.0, 1.0]),
    "image-mean-of-two": ("clip.vision.image_mean", lambda mean: mean[:2]),
    "type-of-a-model": ("general.type", "model"),
    "patch-size": ("clip.vision.patch_size", lambda n: n - 2),
    "image-size": ("clip.vision.image_size", lambda n: 2 * n),
    "heads": ("clip.vision.attention.head_count", lambda n: n // 2),
    "eps": ("clip.vision.attention.layer_norm_epsilon", 1e-3),
    "merge": ("clip.vision.spatial_merge_size", 1),
    "blocks": ("clip.vision.block_count", 2),
    "width": ("clip.vision.embedding_length", lambda n: 2 * n),
    "hidden": ("clip.vision.feed_forward_length", lambda n: n - 1),
    "projection": ("clip.vision.projection_dim", lambda n: 2 * n),
    "projector": ("clip.projector_type", "qwen2vl_merger"),
    "gelu": ("clip.use_gelu", False),
    "encoder": ("clip.has_vision_encoder", False),
    "deepstack": ("clip.vision.is_deepstack_layers", [True]),
    "architecture": ("general.architecture", "qwen35"),
    "file-type": ("general.file_type", 2),
    "file-type-f32": ("general.file_type", 0),
}
RECAST = {
    "heads": ("clip.vision.attention.head_count", "uint64"),
    "eps": ("clip.vision.attention.layer_norm_epsilon", "float64"),
    "mean": ("clip.vision.image_mean", "array[float64]"),
    "merge": ("clip.vision.spatial_merge_size", "int32"),
    "file-type": ("general.file_type", "array[uint32]"),
}
REQUIRED = (
    "clip.vision.image_mean",
    "clip.vision.spatial_merge_size",
    "clip.projector_type",
    "clip.vision.attention.head_count",
    "clip.use_gelu",
    "clip.vision.image_std",
    "clip.vision.image_size",
    "clip.vision.projection_dim",
    "clip.vision.block_count",
    "clip.vision.attention.layer_norm_epsilon",
    "clip.has_vision_encoder",
    "general.architecture",
)
ADDED = {
    "silu": Kv("clip.use_silu", "bool", True),
    "audio": Kv("clip.has_audio_encoder", "bool", True),
    "window": Kv("clip.vision.n_wa_pattern", "uint32", 8),
    "crop": Kv("clip.vision.image_crop_resolution", "uint32", 64),
    "max-pixels": Kv("clip.vision.image_max_pixels", "uint32", 4096),
    "min-pixels": Kv("clip.vision.image_min_pixels", "uint32", 1 << 20),
    "heads-of-keys": Kv("clip.vision.attention.head_count_kv", "uint32", 1),
    "feature-layer": Kv("clip.vision.feature_layer", "array[int32]", [0]),
}
