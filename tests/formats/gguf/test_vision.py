"""The mmproj file: llama.cpp's pairs in its order, the family's tensors under its names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from formats.errors import FormatError
from formats.family.config import Config, read_config
from formats.family.ops import apply_all, shape_after
from formats.family.rules import VISION, VISION_BLOCK
from formats.family.slots import shape_of
from formats.gguf.file import build_header
from formats.gguf.vision import VISION_NAMES, mmproj_metadata, read_preprocessor, vision_tensors
from tests.checkpoints import hub_config, text_config
from tests.gguf_reader import read_gguf

NANO = Path(__file__).parents[2] / "data" / "nano-dense"
IMAGES: dict[str, Any] = {"image_mean": [0.5, 0.25, 0.5], "image_std": [0.5, 1, 0.5]}
RULES = (*VISION, *VISION_BLOCK)


def nano(**changes: Any) -> Config:
    raw = json.loads((NANO / "config.json").read_text())
    return read_config(raw | {"vision_config": raw["vision_config"] | changes})


def pairs(config: Config, images: dict[str, Any] | None = None) -> dict[str, Any]:
    listed = mmproj_metadata(
        config, IMAGES if images is None else images, name="Nano", size_label="240K", file_type=32
    )
    assert len({kv.key for kv in listed}) == len(listed)
    return {kv.key: (kv.kind, kv.value) for kv in listed}


def test_keys_kinds_and_order_are_llama_cpps():
    assert list(pairs(nano(depth=3)).items()) == [
        ("general.architecture", ("string", "clip")),
        ("general.type", ("string", "mmproj")),
        ("general.name", ("string", "Nano")),
        ("general.size_label", ("string", "240K")),
        ("general.file_type", ("uint32", 32)),
        ("clip.has_vision_encoder", ("bool", True)),
        ("clip.vision.projection_dim", ("uint32", 128)),
        ("clip.vision.image_size", ("uint32", 128)),
        ("clip.vision.patch_size", ("uint32", 16)),
        ("clip.vision.embedding_length", ("uint32", 64)),
        ("clip.vision.feed_forward_length", ("uint32", 172)),
        ("clip.vision.block_count", ("uint32", 3)),
        ("clip.vision.attention.head_count", ("uint32", 2)),
        ("clip.vision.image_mean", ("array[float32]", [0.5, 0.25, 0.5])),
        ("clip.vision.image_std", ("array[float32]", [0.5, 1.0, 0.5])),
        ("clip.projector_type", ("string", "qwen3vl_merger")),
        ("clip.use_gelu", ("bool", True)),
        ("clip.vision.spatial_merge_size", ("uint32", 2)),
        ("clip.vision.attention.layer_norm_epsilon", ("float32", 1e-6)),
        ("clip.vision.is_deepstack_layers", ("array[bool]", [False] * 3)),
        ("general.quantization_version", ("uint32", 2)),
    ]


def test_the_gguf_package_reads_the_pairs_and_knows_the_keys(tmp_path: Path):
    listed = mmproj_metadata(nano(), IMAGES, name="Nano", size_label="240K", file_type=0)
    path = tmp_path / "mmproj.gguf"
    path.write_bytes(build_header(listed, [])[0])
    reader = read_gguf(path)
    for kv in listed:
        value = np.float32(kv.value).item() if kv.kind == "float32" else kv.value
        assert reader.fields[kv.key].contents() == value
    keys = gguf.Keys.ClipVision
    assert reader.fields[keys.PROJECTION_DIM].contents() == 128
    assert reader.fields[keys.IS_DEEPSTACK_LAYERS].contents() == [False]


def test_every_vision_tensor_of_the_family_has_names():
    assert set(VISION_NAMES) == {rule.hub for rule in RULES}
    names = [t.gguf for targets in VISION_NAMES.values() for t in targets]
    assert len(set(names)) == len(names) == len(RULES) + 1


def test_the_gguf_package_knows_the_names():
    known = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[gguf.MODEL_ARCH.MMPROJ]}
    for targets in VISION_NAMES.values():
        for target in targets:
            name = target.gguf.removesuffix(".1").replace("{i}", "{bid}")
            bare = name.removesuffix(".weight").removesuffix(".bias")
            assert bare.replace("mm.0", "mm.{bid}").replace("mm.2", "mm.{bid}") in known


@pytest.mark.parametrize(
    ("hub", "names"),
    [
        ("visual.blocks.26.attn.qkv.weight", ["v.blk.26.attn_qkv.weight"]),
        ("visual.blocks.0.attn.proj.bias", ["v.blk.0.attn_out.bias"]),
        ("visual.blocks.1.mlp.linear_fc1.weight", ["v.blk.1.ffn_up.weight"]),
        ("visual.blocks.1.mlp.linear_fc2.weight", ["v.blk.1.ffn_down.weight"]),
        ("visual.blocks.1.norm2.weight", ["v.blk.1.ln2.weight"]),
        ("visual.merger.linear_fc1.weight", ["mm.0.weight"]),
        ("visual.merger.linear_fc2.bias", ["mm.2.bias"]),
        ("visual.merger.norm.bias", ["v.post_ln.bias"]),
        ("visual.pos_embed.weight", ["v.position_embd.weight"]),
        ("visual.patch_embed.proj.weight", ["v.patch_embd.weight", "v.patch_embd.weight.1"]),
        ("visual.patch_embed.proj.bias", ["v.patch_embd.bias"]),
    ],
)
def test_names_are_llama_cpps(hub: str, names: list[str]):
    assert [tensor.gguf for tensor in vision_tensors(hub)] == names


@pytest.mark.parametrize("out", ["F32", "F16", "BF16", "Q8_0"])
def test_matrices_follow_the_type_and_the_rest_is_float32(out: str):
    sizes = nano().sizes
    for rule in RULES:
        matrix = len(shape_of(rule, sizes)) == 2 and rule.hub != "visual.pos_embed.weight"
        patch = rule.hub == "visual.patch_embed.proj.weight"
        expected = out if matrix or (patch and out == "F16") else "F32"
        assert {tensor.dtype(out) for tensor in VISION_NAMES[rule.hub]} == {expected}


def test_the_patch_embedding_is_one_tensor_per_frame():
    stored = torch.randn(5, 3, 2, 4, 4)
    frames = vision_tensors("visual.patch_embed.proj.weight")
    for i, frame in enumerate(frames):
        assert torch.equal(apply_all(frame.ops, stored), stored[:, :, i])
        assert shape_after(frame.ops, (5, 3, 2, 4, 4)) == (5, 3, 4, 4)


def test_the_tower_ends_at_the_width_of_the_text():
    config = read_config(hub_config(sizes="ragged"))
    found = pairs(config)
    assert found["clip.vision.projection_dim"] == ("uint32", 96)
    assert found["clip.vision.image_size"] == ("uint32", 16)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"temporal_patch_size": 1}, "vision_config.temporal_patch_size is 1, expected 2"),
        ({"temporal_patch_size": 4}, "vision_config.temporal_patch_size is 4, expected 2"),
        ({"in_channels": 1}, "vision_config.in_channels is 1, expected 3"),
        ({"out_hidden_size": 64}, "vision_config.out_hidden_size is 64, expected 128"),
        ({"num_position_embeddings": 65}, "num_position_embeddings is 65, expected a square"),
        ({"image_size": 224}, "vision_config.image_size is 224, expected 128"),
        ({"hidden_act": "quick_gelu"}, "vision_config.hidden_act is 'quick_gelu'"),
        ({"deepstack_visual_indexes": [5, 11]}, r"deepstack_visual_indexes is \[5, 11\]"),
    ],
)
def test_a_tower_that_llama_cpp_does_not_compute_is_refused(changes: dict[str, Any], reason: str):
    with pytest.raises(FormatError, match=f"^config.json: .*{reason}"):
        pairs(nano(**changes))


def test_a_text_model_has_no_mmproj_file():
    with pytest.raises(FormatError, match="vision_config is missing"):
        pairs(read_config(text_config()))


@pytest.mark.parametrize("field", ["image_mean", "image_std"])
@pytest.mark.parametrize("value", [0.5, [0.5, 0.5], [0.5, 0.5, "x"], [True] * 3, [1, 1, 1e999]])
def test_channels_are_three_numbers(field: str, value: object):
    with pytest.raises(FormatError, match=f"preprocessor_config.json: {field} is .*3 numbers"):
        pairs(nano(), IMAGES | {field: value})


@pytest.mark.parametrize("field", ["image_mean", "image_std"])
def test_channels_that_are_missing_are_named(field: str):
    with pytest.raises(FormatError, match=f"preprocessor_config.json: {field} is missing"):
        pairs(nano(), {key: value for key, value in IMAGES.items() if key != field})


def test_a_deviation_is_not_zero():
    with pytest.raises(FormatError, match="other than 0"):
        pairs(nano(), IMAGES | {"image_std": [0.5, 0, 0.5]})
    pairs(nano(), IMAGES | {"image_mean": [0, 0, 0]})


def test_the_processors_own_file_overrides():
    files = {
        "preprocessor_config.json": {"image_mean": [1, 1, 1], "image_std": [2, 2, 2]},
        "processor_config.json": {"image_processor": {"image_mean": [3, 3, 3]}},
    }
    found = read_preprocessor({name: json.dumps(raw).encode() for name, raw in files.items()}.get)
    assert found["image_mean"] == [3, 3, 3]
    assert found["image_std"] == [2, 2, 2]
    assert read_preprocessor({}.get) == {}


def test_a_processor_that_is_no_object_is_refused():
    with pytest.raises(
        FormatError, match=r"processor_config\.json: image_processor is not an object"
    ):
        read_preprocessor({"processor_config.json": b'{"image_processor": "x"}'}.get)
