"""Files that only the artifact has and that engines obey, and what others write beside wrongly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from tests.planted.artifact import Artifact
from tests.planted.fault import REMOVED, Fault, in_bases
from tests.planted.right_sides import save_again
from tests.planted.side_faults import fault, replace
from tests.planted.side_field_faults import IMAGES, TOKENIZER, VIDEOS, Change, put

TEXT = in_bases("nano-bf16-split")


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, content in EXTRA.items():
        yield fault(f"extra-{name.replace('/', '-')}", partial(replace, file=name, content=content))
    for name, (file, source, change) in MADE.items():
        yield fault(name, partial(_make, file=file, source=source, change=change))
    # transformers 5.24 takes Qwen2's regex for a dense model of text
    yield fault("saved-by-transformers", _save_again, TEXT, receipts=(REMOVED,))


def _save_again(artifact: Artifact) -> str:
    save_again(artifact.path, artifact.path)
    return TOKENIZER


def _make(artifact: Artifact, file: str, source: str, change: Change) -> str:
    """Write a file of another name with what one of the artifact's says, changed."""
    value = json.loads(artifact.file(source).read_bytes())
    made = change(value)
    artifact.write(file, json.dumps(value if made is None else made, ensure_ascii=False))
    return file


def _nested(kind: str, **fields: Any) -> Change:
    """Return what transformers writes of a preprocessor, with other fields."""
    return lambda config: {"processor_class": "Qwen3VLProcessor", kind: config | fields}


def _vocab(tokenizer: Any) -> dict[str, int]:
    """Return the vocabulary, two tokens of which have each other's ids."""
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    one, two = list(vocab)[300:302]
    return vocab | {one: vocab[two], two: vocab[one]}


def _ids(tokenizer: Any) -> dict[str, int]:
    """Return the added tokens, all moved by one."""
    return {token["content"]: token["id"] + 1 for token in tokenizer["added_tokens"]}


MADE: dict[str, tuple[str, str, Change]] = {
    "processor-of-another-mean": (
        "processor_config.json",
        IMAGES,
        _nested("image_processor", image_mean=[0.48, 0.46, 0.41]),
    ),
    "processor-of-larger-images": (
        "processor_config.json",
        IMAGES,
        _nested("image_processor", max_pixels=99999),
    ),
    "processor-of-other-videos": (
        "processor_config.json",
        VIDEOS,
        _nested("video_processor", merge_size=4),
    ),
    "processor-with-code": (
        "processor_config.json",
        IMAGES,
        put("auto_map", {"AutoProcessor": "processing.P"}),
    ),
    "vocab-of-another": ("vocab.json", TOKENIZER, _vocab),
    "added-tokens-moved": ("added_tokens.json", TOKENIZER, _ids),
}
# Files that an engine or a tokenizer obeys if they are there.
EXTRA = {
    "adapter_config.json": '{"peft_type": "LORA", "base_model_name_or_path": "x"}',
    "adapter_model.bin": "a pickle",
    "hf_quant_config.json": '{"quantization": {"quant_algo": "FP8"}}',
    "quantize_config.json": '{"bits": 4, "group_size": 128, "desc_act": false}',
    "quant_config.json": '{"w_bit": 4, "q_group_size": 128, "version": "GEMM"}',
    "quant_model_description.json": '{"model_quant_type": "W8A8"}',
    "added_tokens.json": '{"<|im_end|>": 3}',
    "special_tokens_map.json": '{"eos_token": "<|endoftext|>"}',
    "chat_template.json": '{"chat_template": "{{ messages }}"}',
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "processor_config.json": '{"image_mean": [0.1, 0.1, 0.1]}',
    "tokenizer.model": "not a tokenizer",
    "modules.json": '[{"idx": 0, "type": "sentence_transformers.models.Transformer"}]',
    "sentence_bert_config.json": '{"max_seq_length": 64, "do_lower_case": true}',
    "pytorch_model.bin": "a pickle",
    "modeling_qwen.py": "raise SystemExit\n",
    "custom_generate/generate.py": "raise SystemExit\n",
}
