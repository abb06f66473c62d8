"""Right files beside the tensors, as others write them: the same said in other files or words."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.planted.artifact import Artifact
from tests.planted.edit import INDEX
from tests.planted.side_faults import PAIRS
from tests.planted.side_field_faults import (
    GENERATION,
    IMAGES,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VIDEOS,
)

Change = Callable[[Artifact], object]


def changes() -> Iterator[tuple[str, str, str, Change]]:
    """Yield kind, name, base and change of each."""
    for name, (bases, change) in FILES.items():
        for base in bases:
            yield "side files", name, base, partial(_others, change=change)
    for name, (bases, change) in AFTERWARDS.items():
        for base in bases:
            yield "side files", name, base, change


def _others(artifact: Artifact, change: Change) -> None:
    artifact.strip()
    change(artifact)


def _by_transformers(artifact: Artifact) -> None:
    """Save tokenizer, image processor and sampling again, in the layout of transformers 5."""
    save_again(artifact.path, artifact.path)


def save_again(source: Path, out: Path) -> None:
    """Save with transformers what it reads of a folder, without vocab.json and merges.txt."""
    from transformers import AutoImageProcessor, AutoTokenizer, GenerationConfig

    kinds = (AutoTokenizer, AutoImageProcessor, GenerationConfig)
    read = [kind.from_pretrained(source) for kind in kinds]
    for name in (*PAIRS, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, IMAGES, GENERATION):
        (out / name).unlink(missing_ok=True)
    for one in read:
        one.save_pretrained(out)


def _by_older_transformers(artifact: Artifact) -> None:
    """Write what transformers 4 does: special tokens in three files, every field of images."""
    tokens = json.loads(artifact.file(TOKENIZER).read_bytes())["added_tokens"]
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    texts = [token["content"] for token in tokens]
    named = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    special = {key: {"content": text, **flags} for key, text in named.items()}
    artifact.write("added_tokens.json", json.dumps({t["content"]: t["id"] for t in tokens}))
    artifact.write(
        "special_tokens_map.json", json.dumps({"additional_special_tokens": texts, **special})
    )
    with artifact.json(TOKENIZER_CONFIG) as config:
        config |= {"additional_special_tokens": texts, "extra_special_tokens": {}}
        config |= {"processor_class": "Qwen3VLProcessor", "padding_side": "left"}
    for name, more in ((IMAGES, {}), (VIDEOS, FRAMES)):
        with artifact.json(name) as config:
            config |= dict.fromkeys(NULLS) | SAID | more


NULLS = ("crop_size", "device", "disable_grouping", "do_center_crop", "do_pad", "pad_size")
SAID: dict[str, Any] = {
    "data_format": "channels_first",
    "default_to_square": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "input_data_format": None,
    "max_pixels": None,
    "min_pixels": None,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "return_tensors": None,
}
FRAMES = {
    "do_sample_frames": True,
    "fps": 2,
    "max_frames": 768,
    "min_frames": 4,
    "num_frames": None,
    "return_metadata": False,
    "video_metadata": None,
}


def _one_processor(artifact: Artifact) -> None:
    """Nest both preprocessors in processor_config.json, as transformers 5 does."""
    images, videos = (json.loads(artifact.file(name).read_bytes()) for name in (IMAGES, VIDEOS))
    nested = {"image_processor": images, "video_processor": videos}
    for name in (IMAGES, VIDEOS):
        artifact.file(name).unlink()
    artifact.write(
        "processor_config.json", json.dumps({"processor_class": "Qwen3VLProcessor", **nested})
    )


def _pixels(artifact: Artifact) -> None:
    """Name the sizes of images as older files do."""
    with artifact.json(IMAGES) as config:
        size = config.pop("size")
        config |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        config["image_processor_type"] = "Qwen2VLImageProcessor"


def _template_in_the_config(artifact: Artifact) -> None:
    with artifact.json(TOKENIZER_CONFIG) as config:
        config["chat_template"] = artifact.file(TEMPLATE).read_text()
    artifact.file(TEMPLATE).unlink()


def _template_everywhere(artifact: Artifact) -> None:
    """Keep the template where each kind of reader looks, and end the file with a newline."""
    text = artifact.file(TEMPLATE).read_text()
    with artifact.json(TOKENIZER_CONFIG) as config:
        config["chat_template"] = [{"name": "default", "template": text}]
    artifact.write("chat_template.json", json.dumps({"chat_template": text}))
    artifact.write(TEMPLATE, text.removesuffix("\n") + ("" if text.endswith("\n") else "\n"))


def _other_words(artifact: Artifact) -> None:
    """Say of the tokenizer what changes no id: offsets, settings of a byte decoder, no version."""
    bytewise = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    with artifact.json(TOKENIZER) as tokenizer:
        tokenizer["post_processor"] = {"type": "Sequence", "processors": [bytewise]}
        tokenizer["decoder"] = bytewise | {"use_regex": False}
        tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [tokenizer["normalizer"]]}
        del tokenizer["version"]
        tokenizer["added_tokens"].reverse()
        model = tokenizer["model"]
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
        model |= {"continuing_subword_prefix": "", "end_of_word_suffix": "", "dropout": 0.0}
        del model["ignore_merges"]


def _pairs(artifact: Artifact) -> None:
    """Write vocab.json and merges.txt beside a tokenizer, as slow tokenizers do."""
    tokenizer = json.loads(artifact.file(TOKENIZER).read_bytes())
    lines = [" ".join(pair) for pair in tokenizer["model"]["merges"]]
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    artifact.write("vocab.json", json.dumps(tokenizer["model"]["vocab"] | added))
    artifact.write("merges.txt", "\n".join(["#version: 0.2", *lines]) + "\n")


def _other_class(artifact: Artifact) -> None:
    with artifact.json(TOKENIZER_CONFIG) as config:
        config |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**30}
        config["turn_token"] = "<|im_end|>"
        del config["added_tokens_decoder"], config["add_bos_token"], config["split_special_tokens"]


def _named_tokens(artifact: Artifact) -> None:
    """Name the tokens of images and the processor, as a processor does that is saved with them."""
    with artifact.json("tokenizer_config.json") as config:
        config |= {"image_token": "<|image_pad|>", "processor_class": "Qwen3VLProcessor"}
        config["extra_special_tokens"] = {"vision_bos_token": "<|vision_start|>"}


def _defaults_of_generation(artifact: Artifact) -> None:
    with artifact.json(GENERATION) as generation:
        generation["eos_token_id"].reverse()
        generation["eos_token_id"].append(generation["eos_token_id"][0])
        generation |= {"repetition_penalty": 1.0, "num_beams": 1, "use_cache": True}
        generation |= {"max_new_tokens": None, "bad_words_ids": None, "_from_model_config": False}
        del generation["pad_token_id"], generation["bos_token_id"]


def _weights_alone(artifact: Artifact) -> None:
    kept = ("config.json", INDEX, GENERATION)
    for path in artifact.path.iterdir():
        if path.name not in kept and path.suffix != ".safetensors":
            path.unlink()


def _no_images(artifact: Artifact) -> None:
    for name in (IMAGES, VIDEOS):
        artifact.file(name).unlink()


def _spare_index(artifact: Artifact) -> None:
    with artifact.json(INDEX) as index:
        index |= {"metadata": {"total_parameters": 5, "format": "pt"}, "made_by": "x"}


HUB = ("nano-fp8-block-hub", "moe-fp8-block-hub")
TEXT = ("nano-fp8-block", "wide-fp8-channel")
FILES: dict[str, tuple[tuple[str, ...], Change]] = {
    "saved by transformers": (HUB, _by_transformers),
    "saved by transformers 4": (("moe-fp8-block-hub", "wide-mixed"), _by_older_transformers),
    "one processor": (HUB, _one_processor),
    "sizes in pixels": (("nano-fp8-block-hub",), _pixels),
    "template in the config": (TEXT, _template_in_the_config),
    "template everywhere": (("nano-fp8-block-hub", "wide-mixed"), _template_everywhere),
    "tokenizer in other words": (TEXT, _other_words),
    "vocabulary beside": (("wide-mixed", "moe-bf16-split"), _pairs),
    "another class of tokenizer": (TEXT, _other_class),
    "tokens of images by name": (("nano-fp8-block-hub", "wide-fp8-channel"), _named_tokens),
    "defaults of generation": (("nano-bf16-split", "moe-fp8-channel"), _defaults_of_generation),
    "weights alone": (("nano-fp8-block-hub", "wide-sharded"), _weights_alone),
    "no preprocessors of text": (TEXT, _no_images),
    "index without a total": (("wide-sharded", "nano-fp8-block"), _spare_index),
}


def _owner(artifact: Artifact) -> None:
    """Add what an owner may: nothing of it is read by an engine."""
    artifact.write("README.md", "# A model\n")
    artifact.write("LICENSE", "free\n")
    artifact.write("notes.txt", "a text\n")
    artifact.write("eval_results.json", '{"mmlu": 0.5}')
    artifact.write("trainer_state.json", "{}")
    artifact.write("params.json", '{"learning_rate": 1e-5}')
    artifact.write("training_args.bin", b"a pickle")
    artifact.write("imatrix.gguf", b"GGUF")
    artifact.write("images/figure.png", b"\x89PNG")
    artifact.write("logs/modeling.log", "done\n")
    artifact.write("Modelfile", "FROM .\n")


AFTERWARDS: dict[str, tuple[tuple[str, ...], Change]] = {
    "an owner's files": (("nano-fp8-block-hub", "wide-sharded"), _owner),
}
