"""Fields of the files beside the tensors, and what somebody might make of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Change = Callable[[Any], object]
TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
GENERATION, IMAGES = "generation_config.json", "preprocessor_config.json"
VIDEOS = "video_preprocessor_config.json"


def _swap_tokens(tokenizer: Any) -> None:
    vocab = tokenizer["model"]["vocab"]
    one, two = list(vocab)[300:302]
    vocab[one], vocab[two] = vocab[two], vocab[one]


def _swap_merges(tokenizer: Any) -> None:
    merges = tokenizer["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


def _split_by_spaces(tokenizer: Any) -> None:
    tokenizer["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": "\\s+"}


def _begin(tokenizer: Any) -> None:
    first = tokenizer["added_tokens"][0]["content"]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": first, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [],
        "special_tokens": {},
    }


def added(field: str, value: Any) -> Change:
    """Return a change of the third added token, <|im_end|>."""
    return lambda tokenizer: tokenizer["added_tokens"][2].update({field: value})


def put(field: str, value: Any) -> Change:
    """Return a change of one field."""
    return lambda config: config.update({field: value})


def _pre(kind: str, field: str, value: Any) -> Change:
    """Return a change of one pre-tokenizer."""

    def change(tokenizer: Any) -> None:
        parts = tokenizer["pre_tokenizer"]["pretokenizers"]
        next(part for part in parts if part["type"] == kind)[field] = value

    return change


def _strip_listed(config: Any) -> None:
    list(config["added_tokens_decoder"].values())[2]["rstrip"] = True


def _null_listed(config: Any) -> None:
    list(config["added_tokens_decoder"].values())[2]["lstrip"] = None


def _rename_listed(config: Any) -> None:
    list(config["added_tokens_decoder"].values())[2]["content"] = "<|im_stop|>"


JSON: dict[str, tuple[str, Change]] = {
    "tokens-swapped": (TOKENIZER, _swap_tokens),
    "merges-swapped": (TOKENIZER, _swap_merges),
    "merges-lost": (TOKENIZER, lambda t: t["model"]["merges"].pop()),
    "added-token-renamed": (TOKENIZER, added("content", "<|im_stop|>")),
    "added-token-not-special": (TOKENIZER, added("special", False)),
    "added-token-strips": (TOKENIZER, added("lstrip", True)),
    "added-token-s-flag-null": (TOKENIZER, added("lstrip", None)),
    "token-s-id-as-a-float": (TOKENIZER, lambda t: t["model"]["vocab"].update({"!": 0.0})),
    "added-token-lost": (TOKENIZER, lambda t: t["added_tokens"].pop()),
    "pre-tokenizer": (TOKENIZER, _split_by_spaces),
    "normalizer-lost": (TOKENIZER, put("normalizer", None)),
    "normalizer-lowercase": (TOKENIZER, put("normalizer", {"type": "Lowercase"})),
    "post-processor": (TOKENIZER, _begin),
    "decoder-lost": (TOKENIZER, put("decoder", None)),
    "truncation": (
        TOKENIZER,
        put(
            "truncation",
            {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0},
        ),
    ),
    "padding": (
        TOKENIZER,
        put("padding", {"strategy": {"Fixed": 64}, "direction": "Right", "pad_id": 0}),
    ),
    "space-before-the-text": (TOKENIZER, _pre("ByteLevel", "add_prefix_space", True)),
    "pieces-removed": (TOKENIZER, _pre("Split", "behavior", "Removed")),
    "pieces-of-words-marked": (
        TOKENIZER,
        lambda t: t["model"].update(continuing_subword_prefix="##"),
    ),
    "pieces-inverted": (TOKENIZER, _pre("Split", "invert", True)),
    "merges-ignored": (TOKENIZER, lambda t: t["model"].update(ignore_merges=True)),
    "merges-dropped-at-random": (TOKENIZER, lambda t: t["model"].update(dropout=0.1)),
    "bytes-as-tokens": (TOKENIZER, lambda t: t["model"].update(byte_fallback=True)),
    "decoder-of-another": (TOKENIZER, put("decoder", {"type": "Metaspace", "replacement": "_"})),
    "tokenizer-of-another-version": (TOKENIZER, put("version", "1.1")),
    "tokenizer-without-a-version-s-value": (TOKENIZER, put("version", None)),
    "tokenizer-with-a-part-more": (TOKENIZER, put("speculation", {"draft": 3})),
    "image-token-invented": (TOKENIZER_CONFIG, put("image_token", "<|new|>")),
    "pre-tokenizer-unknown": (TOKENIZER, put("pre_tokenizer", {"type": "New"})),
    "normalizer-unknown": (TOKENIZER, put("normalizer", {"type": "New"})),
    "decoder-unknown": (TOKENIZER, put("decoder", {"type": "New"})),
    "post-processor-unknown": (TOKENIZER, put("post_processor", {"type": "New"})),
    "regex-half-open": (TOKENIZER, _pre("Split", "pattern", {"Regex": "(("})),
    "any-token-invented": (TOKENIZER_CONFIG, put("tool_token", "the")),
    "tokens-of-a-model-invented": (
        TOKENIZER_CONFIG,
        put("model_specific_special_tokens", {"image_token": "<|new|>"}),
    ),
    "end-token": (TOKENIZER_CONFIG, put("eos_token", "<|endoftext|>")),
    "end-token-strips": (
        TOKENIZER_CONFIG,
        put("eos_token", {"content": "<|im_end|>", "lstrip": True, "special": True}),
    ),
    "pad-token": (TOKENIZER_CONFIG, put("pad_token", "<|im_end|>")),
    "begin-token-added": (TOKENIZER_CONFIG, put("add_bos_token", True)),
    "prefix-space": (TOKENIZER_CONFIG, put("add_prefix_space", True)),
    "tokenizer-class": (TOKENIZER_CONFIG, put("tokenizer_class", "LlamaTokenizer")),
    "template-in-the-config": (TOKENIZER_CONFIG, put("chat_template", "{{ messages }}")),
    "tokens-split": (TOKENIZER_CONFIG, put("split_special_tokens", True)),
    "short-context": (TOKENIZER_CONFIG, put("model_max_length", 128)),
    "length-of-text": (TOKENIZER_CONFIG, put("model_max_length", "64")),
    "tokenizer-with-code": (TOKENIZER_CONFIG, put("auto_map", {"AutoTokenizer": ["x.T", None]})),
    "special-token-invented": (TOKENIZER_CONFIG, put("additional_special_tokens", ["<|new|>"])),
    "image-token-of-videos": (TOKENIZER_CONFIG, put("image_token", "<|video_pad|>")),
    "listed-image-token-of-videos": (
        TOKENIZER_CONFIG,
        put("extra_special_tokens", {"image_token": "<|video_pad|>"}),
    ),
    "special-token-of-words": (TOKENIZER_CONFIG, put("extra_special_tokens", {"word": "the"})),
    "listed-token-s-flag-null": (TOKENIZER_CONFIG, _null_listed),
    "listed-tokens-as-a-list": (TOKENIZER_CONFIG, put("added_tokens_decoder", [])),
    "listed-token-strips": (TOKENIZER_CONFIG, _strip_listed),
    "listed-token-renamed": (TOKENIZER_CONFIG, _rename_listed),
    "template-for-tools": (
        TOKENIZER_CONFIG,
        put("chat_template", [{"name": "tool_use", "template": "{{ tools }}"}]),
    ),
    "spaces-cleaned-up": (TOKENIZER_CONFIG, put("clean_up_tokenization_spaces", True)),
    "end-of-generation": (GENERATION, put("eos_token_id", 3)),
    "ends-as-floats": (
        GENERATION,
        lambda g: g.update(eos_token_id=[float(one) for one in g["eos_token_id"]]),
    ),
    "end-beyond-the-vocabulary": (GENERATION, put("eos_token_id", 1 << 20)),
    "an-end-lost": (GENERATION, lambda g: g["eos_token_id"].pop(0)),
    "temperature": (GENERATION, put("temperature", 1.6)),
    "greedy": (GENERATION, put("do_sample", False)),
    "penalty-added": (GENERATION, put("repetition_penalty", 1.3)),
    "an-end-more": (GENERATION, lambda g: g["eos_token_id"].append(5)),
    "short-answers": (GENERATION, put("max_new_tokens", 16)),
    "words-suppressed": (GENERATION, put("suppress_tokens", [3, 4])),
    "stop-at-words": (GENERATION, put("stop_strings", ["the"])),
    "rare-words-cut": (GENERATION, put("min_p", 0.3)),
    "beams": (GENERATION, put("num_beams", 4)),
    "top-k-lost": (GENERATION, lambda g: g.pop("top_k")),
    "image-mean": (IMAGES, put("image_mean", [0.48, 0.46, 0.41])),
    "image-std-of-zeros": (IMAGES, put("image_std", [0, 0, 0])),
    "image-size-as-text": (IMAGES, put("size", "large")),
    "image-size": (IMAGES, put("size", {"longest_edge": 1024, "shortest_edge": 256})),
    "patch-size": (IMAGES, put("patch_size", 14)),
    "video-mean": (VIDEOS, put("image_std", [0.27, 0.26, 0.28])),
    "images-not-normalised": (IMAGES, put("do_normalize", False)),
    "images-not-scaled": (IMAGES, put("do_rescale", False)),
    "images-scaled-otherwise": (IMAGES, put("rescale_factor", 1 / 127.5)),
    "images-resampled-otherwise": (IMAGES, put("resample", 0)),
    "images-of-most-pixels": (IMAGES, put("max_pixels", 50000)),
    "image-std-lost": (IMAGES, lambda config: config.pop("image_std")),
    "images-cropped": (IMAGES, put("do_center_crop", True)),
    "images-with-code": (IMAGES, put("auto_map", {"AutoImageProcessor": "image.P"})),
    "video-frames": (VIDEOS, put("fps", 24)),
    "video-frames-counted": (VIDEOS, put("num_frames", 4)),
    "video-merge": (VIDEOS, put("merge_size", 4)),
    "processor-of-no-class": (IMAGES, put("processor_class", "")),
    "processor-of-another": (TOKENIZER_CONFIG, put("processor_class", "LlavaProcessor")),
    "image-class": (IMAGES, put("image_processor_type", "CLIPImageProcessor")),
}
