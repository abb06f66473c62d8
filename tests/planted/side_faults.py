"""Faults beside the tensors: tokenizer, template, sampling, preprocessors, strays, the index."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.planted.artifact import Artifact, Base
from tests.planted.edit import INDEX, editing
from tests.planted.fault import (
    BOTH,
    FORGED,
    STRUCTURE,
    UNOPENED,
    Fault,
    Names,
    Where,
    in_bases,
    in_outputs,
)

Change = Callable[[Any], object]
HOMES = in_bases(
    "nano-fp8-block", "nano-fp8-block-hub", "wide-fp8-channel", "moe-bf16-split", "wide-mixed"
)
SHARDED = in_outputs("sharded")
TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
GENERATION, IMAGES = "generation_config.json", "preprocessor_config.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 1234\n"


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, (file, change) in JSON.items():
        yield _fault(name, partial(_edit, file=file, change=change))
    for name, (file, content) in CONTENTS.items():
        yield _fault(name, partial(_replace, file=file, content=content))
    for file in (TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, GENERATION):
        yield _fault(f"{file}-missing", partial(_remove, file=file))
    yield _fault("images-missing", partial(_remove, file=IMAGES), _with_vision)
    yield _fault(
        "images-missing-of-text",
        partial(_remove, file=IMAGES),
        lambda base: HOMES(base) and not _with_vision(base),
        receipts=(FORGED,),
    )
    for file, more in PAIRS.items():
        yield _fault(f"{file}-missing", partial(_remove, file=file), _bundled, receipts=(FORGED,))
        yield _fault(f"{file}-changed", partial(_replace, file=file, content=more), _bundled)
    for file, content in EXTRA.items():
        yield _fault(f"extra-{file}", partial(_replace, file=file, content=content))
    code = partial(_replace, file="modeling_qwen.py", content="raise SystemExit\n")
    yield _fault("extra-code", code, receipts=(FORGED,))
    yield from _index()


def _bundled(base: Base) -> bool:
    """Whether the model has vocab.json and merges.txt too."""
    return HOMES(base) and base.model == "nano"


def _with_vision(base: Base) -> bool:
    """Whether images are input of the model."""
    return base.output == "fp8-block-hub"


def _fault(
    name: str,
    plant: Callable[[Artifact], str],
    where: Where = HOMES,
    receipts: tuple[str, ...] = BOTH,
) -> Fault:
    return Fault("side file", name, plant, where, STRUCTURE, receipts=receipts)


def _edit(artifact: Artifact, file: str, change: Change) -> str:
    with artifact.json(file) as value:
        change(value)
    return file


def _replace(artifact: Artifact, file: str, content: str | Callable[[bytes], bytes]) -> str:
    old = artifact.file(file).read_bytes() if callable(content) else b""
    artifact.write(file, content(old) if callable(content) else content)
    return file


def _remove(artifact: Artifact, file: str) -> str:
    artifact.file(file).unlink()
    return file


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


JSON: dict[str, tuple[str, Change]] = {
    "tokens-swapped": (TOKENIZER, _swap_tokens),
    "merges-swapped": (TOKENIZER, _swap_merges),
    "merges-lost": (TOKENIZER, lambda t: t["model"]["merges"].pop()),
    "added-token-renamed": (TOKENIZER, added("content", "<|im_stop|>")),
    "added-token-not-special": (TOKENIZER, added("special", False)),
    "added-token-strips": (TOKENIZER, added("lstrip", True)),
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
    "end-token": (TOKENIZER_CONFIG, put("eos_token", "<|endoftext|>")),
    "pad-token": (TOKENIZER_CONFIG, put("pad_token", "<|im_end|>")),
    "begin-token-added": (TOKENIZER_CONFIG, put("add_bos_token", True)),
    "prefix-space": (TOKENIZER_CONFIG, put("add_prefix_space", True)),
    "tokenizer-class": (TOKENIZER_CONFIG, put("tokenizer_class", "LlamaTokenizer")),
    "template-in-the-config": (TOKENIZER_CONFIG, put("chat_template", "{{ messages }}")),
    "tokens-split": (TOKENIZER_CONFIG, put("split_special_tokens", True)),
    "short-context": (TOKENIZER_CONFIG, put("model_max_length", 128)),
    "end-of-generation": (GENERATION, put("eos_token_id", 3)),
    "an-end-lost": (GENERATION, lambda g: g["eos_token_id"].pop(0)),
    "temperature": (GENERATION, put("temperature", 1.6)),
    "greedy": (GENERATION, put("do_sample", False)),
    "penalty-added": (GENERATION, put("repetition_penalty", 1.3)),
    "top-k-lost": (GENERATION, lambda g: g.pop("top_k")),
    "image-mean": (IMAGES, put("image_mean", [0.48, 0.46, 0.41])),
    "image-size": (IMAGES, put("size", {"longest_edge": 1024, "shortest_edge": 256})),
    "patch-size": (IMAGES, put("patch_size", 14)),
    "video-mean": ("video_preprocessor_config.json", put("image_std", [0.27, 0.26, 0.28])),
    "image-class": (IMAGES, put("image_processor_type", "CLIPImageProcessor")),
}


def half(content: bytes) -> bytes:
    """Return the first half of a file."""
    return content[: len(content) // 2]


def without_prompt(content: bytes) -> bytes:
    """Return the template without what starts the answer."""
    return b"".join(content.splitlines(keepends=True)[:-1])


CONTENTS: dict[str, tuple[str, str | Callable[[bytes], bytes]]] = {
    "template-cut": (TEMPLATE, half),
    "template-without-prompt": (TEMPLATE, without_prompt),
    "template-empty": (TEMPLATE, ""),
    "template-of-another": (TEMPLATE, "{% for m in messages %}[INST]{{ m.content }}{% endfor %}"),
    "template-a-newline-more": (TEMPLATE, lambda content: content.replace(b"\\n", b"\\n\\n")),
    "tokenizer-empty": (TOKENIZER, ""),
    "tokenizer-cut": (TOKENIZER, half),
    "tokenizer-a-pointer": (TOKENIZER, POINTER.format("0" * 64)),
    "tokenizer-config-a-pointer": (TOKENIZER_CONFIG, POINTER.format("1" * 64)),
    "tokenizer-config-an-empty-object": (TOKENIZER_CONFIG, "{}"),
    "generation-empty": (GENERATION, ""),
    "generation-an-empty-object": (GENERATION, "{}"),
}
PAIRS: dict[str, Callable[[bytes], bytes]] = {
    "vocab.json": lambda content: content.replace(b'"th"', b'"ht"', 1),
    "merges.txt": half,
}
# Files that an engine or a tokenizer obeys if they are there.
EXTRA = {
    "adapter_config.json": '{"peft_type": "LORA", "base_model_name_or_path": "x"}',
    "hf_quant_config.json": '{"quantization": {"quant_algo": "FP8"}}',
    "added_tokens.json": '{"<|im_end|>": 3}',
    "special_tokens_map.json": '{"eos_token": "<|endoftext|>"}',
    "chat_template.json": '{"chat_template": "{{ messages }}"}',
    "processor_config.json": '{"image_mean": [0.1, 0.1, 0.1]}',
    "tokenizer.model": "not a tokenizer",
}


def _index() -> Iterator[Fault]:
    """Yield faults of the index and of the header beside the tensors."""

    def add(name: str, plant: Callable[[Artifact], Names], where: Where = HOMES, **more: Any):
        return Fault("index", name, plant, where, STRUCTURE, **more)

    yield add("total-too-small", partial(_total, change=-1))
    yield add("total-doubled", partial(_total, change=None))
    yield add("missing", partial(_remove, file=INDEX), SHARDED)
    yield add("missing-of-one-file", partial(_remove, file=INDEX), receipts=(FORGED,))
    yield add("a-tensor-in-another-file", _misplace, SHARDED, codes=UNOPENED)
    yield add("a-tensor-left-out", _leave_out)
    yield add("a-tensor-too-many", _promise, codes=UNOPENED)
    yield add("a-file-that-is-not-there", _rename, codes=UNOPENED)
    yield add(
        "an-empty-map", partial(_replace, file=INDEX, content='{"weight_map": {}}'), codes=UNOPENED
    )
    yield add("cut", partial(_replace, file=INDEX, content=half), codes=UNOPENED)
    yield add("stray-shard", _stray)
    for name, metadata in (("of-mlx", {"format": "mlx"}), ("of-tensorflow", {"format": "tf"})):
        yield add(f"header-{name}", partial(_metadata, metadata=metadata))
    more = {"format": "pt", "made_by": "x"}
    yield add("header-says-more", partial(_metadata, metadata=more), receipts=(FORGED,))


def _total(artifact: Artifact, change: int | None) -> tuple[str, ...]:
    with artifact.json(INDEX) as index:
        total = index["metadata"]["total_size"]
        index["metadata"]["total_size"] = 2 * total if change is None else total + change
    return (INDEX, "total_size")


def _some_tensor(index: dict[str, Any]) -> str:
    return next(name for name in index["weight_map"] if name.endswith("up_proj.weight"))


def _misplace(artifact: Artifact) -> str:
    with artifact.json(INDEX) as index:
        name, files = _some_tensor(index), sorted(set(index["weight_map"].values()))
        index["weight_map"][name] = next(f for f in files if f != index["weight_map"][name])
    return name


def _leave_out(artifact: Artifact) -> str:
    with artifact.json(INDEX) as index:
        name = _some_tensor(index)
        del index["weight_map"][name]
    return name


def _promise(artifact: Artifact) -> str:
    with artifact.json(INDEX) as index:
        file = index["weight_map"][_some_tensor(index)]
        index["weight_map"]["model.layers.0.extra.weight"] = file
    return "model.layers.0.extra.weight"


def _rename(artifact: Artifact) -> str:
    with artifact.json(INDEX) as index:
        index["weight_map"][_some_tensor(index)] = "model-00009-of-00009.safetensors"
    return "model-00009-of-00009.safetensors"


def _stray(artifact: Artifact) -> str:
    """Leave a file of an earlier conversion beside the others: SGLang and others load by glob."""
    first = artifact.tensor_files()[0]
    artifact.write("model-00007-of-00008.safetensors", first.read_bytes())
    return "model-00007-of-00008.safetensors"


def _metadata(artifact: Artifact, metadata: dict[str, str]) -> str:
    with editing(artifact) as tensors:
        tensors.files[0].metadata = metadata
    return tensors.files[0].path.name
