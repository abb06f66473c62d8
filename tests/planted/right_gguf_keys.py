"""Right GGUF files whose keys say the same in another way, or say what an absent key means.

Each was loaded by llama.cpp's build 11549 and gave the logits or the image of its base; but where
the bounds of an image's size are stated, images are as large as the preprocessor makes them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from formats.gguf.file import build_header
from formats.gguf.header import Kv
from qwen35_convert import api
from qwen35_convert.recipe.recipe import read_recipe
from tests.planted.artifact import Artifact, Workshop
from tests.planted.edit import editing, read_file
from tests.planted.right_vision_keys import OF_A_TOOL, VISIONS, of_vision

Change = Callable[[Artifact], object]
Pairs = dict[str, Kv]
OfPairs = Callable[[Pairs], object]
Make = Callable[[Workshop, Path], tuple[Path, Path]]
WIDER = 64


def changes() -> Iterator[tuple[str, str, str, Change]]:
    """Yield kind, name, base and change of each."""
    for name, (bases, change) in TEXT.items():
        for base in bases:
            yield "keys", name, base, partial(_of_text, change=change)
    for name, change in VISIONS.items():
        for base in ("nano-mmproj", "wide-mmproj-bf16"):
            yield "keys", f"vision {name}", base, partial(of_vision, change=change)
    yield "keys", "wider alignment", "nano-q8_0", _align


def makers() -> Iterator[tuple[str, str, Make]]:
    """Yield kind, name and what makes the artifact."""
    yield "keys", "source moved", _moved
    yield "keys", "interval of the converter", _interval


def _of_text(artifact: Artifact, change: OfPairs) -> None:
    artifact.strip()
    with editing(artifact) as tensors:
        pairs = {pair.key: pair for pair in tensors.pairs()}
        change(pairs)
        tensors.files[0].pairs = list(pairs.values())


def _align(artifact: Artifact) -> None:
    """Let every tensor begin at a multiple of 64."""
    artifact.strip()
    file = read_file(artifact.path)
    file.pairs.append(Kv("general.alignment", "uint32", WIDER))
    entries = list(file.entries.values())
    header, _ = build_header(file.pairs, [entry.info for entry in entries], WIDER)
    data = (entry.data.tobytes() for entry in entries)
    artifact.write(artifact.path.name, header + b"".join(d + bytes(-len(d) % WIDER) for d in data))


def _moved(workshop: Workshop, folder: Path) -> tuple[Path, Path]:
    """Verify an artifact of ours, with its receipt, after its source's folder was renamed."""
    folder.mkdir()
    before, after = folder / "a-model", folder / "another-name"
    shutil.copytree(workshop.model("nano"), before)
    recipe = read_recipe("gguf-q8_0", ("vision=keep",))
    api.convert(before, folder / "m.gguf", recipe, options=api.RunOptions(workers=1, verify=False))
    before.rename(after)
    return folder / "m.gguf", after


def _interval(workshop: Workshop, folder: Path) -> tuple[Path, Path]:
    """Say 4 as llama.cpp's converter does where config.json has no interval."""
    folder.mkdir()
    source = folder / "source"
    shutil.copytree(workshop.model("wide"), source)
    config = json.loads((source / "config.json").read_bytes())
    del config["text_config"]["full_attention_interval"]
    (source / "config.json").write_text(json.dumps(config))
    options = api.RunOptions(workers=1, verify=False)
    api.convert(source, folder / "m.gguf", read_recipe("gguf-q8_0"), options=options)
    (folder / "m.gguf.receipt.json").unlink()
    file = read_file(folder / "m.gguf")
    key = "qwen35.full_attention_interval"
    file.pairs = [replace(pair, value=4) if pair.key == key else pair for pair in file.pairs]
    file.path.write_bytes(file.content())
    return file.path, source


def put(*pairs: Kv) -> OfPairs:
    """Return a change that adds keys, or gives them other values."""
    return lambda known: known.update({pair.key: pair for pair in pairs})


def recast(key: str, kind: str, value: Callable[[Any], Any] = lambda v: v) -> OfPairs:
    """Return a change of a key's kind, and of how its value is written."""
    return lambda known: known.update({key: Kv(key, kind, value(known[key].value))})


def _by_block(known: Pairs) -> None:
    for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        key = f"qwen35.{name}"
        sizes = [known[key].value] * known["qwen35.block_count"].value
        known[key] = Kv(key, "array[uint32]", sizes)


def _without(*keys: str) -> OfPairs:
    return lambda known: [known.pop(key) for key in keys]


def _middle_tokens(known: Pairs) -> None:
    """Name the tokens that are found by their text where no key does."""
    tokens = known["tokenizer.ggml.tokens"].value
    for key, text in (
        ("eot", "<|im_end|>"),
        ("fim_pre", "<|fim_prefix|>"),
        ("fim_suf", "<|fim_suffix|>"),
        ("fim_mid", "<|fim_middle|>"),
        ("fim_pad", "<|fim_pad|>"),
        ("fim_rep", "<|repo_name|>"),
        ("fim_sep", "<|file_sep|>"),
    ):
        if text in tokens:
            name = f"tokenizer.ggml.{key}_token_id"
            known[name] = Kv(name, "uint32", tokens.index(text))


def _begin(known: Pairs) -> None:
    """Name the token that generation_config.json calls the begin of a text; none is added."""
    known[BOS] = Kv(BOS, "uint32", known["tokenizer.ggml.tokens"].value.index("<|endoftext|>"))


def _original_context(known: Pairs) -> None:
    key = "qwen35.rope.scaling.original_context_length"
    known[key] = Kv(key, "uint32", known["qwen35.context_length"].value)


def _scores(known: Pairs) -> None:
    """Give every token a score: of a byte-level BPE none is read."""
    key, count = "tokenizer.ggml.scores", len(known["tokenizer.ggml.tokens"].value)
    known[key] = Kv(key, "array[float32]", [0.0] * count)


BOS = "tokenizer.ggml.bos_token_id"
TEMPLATE = "tokenizer.chat_template"
STATED = (
    Kv("qwen35.rope.scaling.type", "string", "none"),
    Kv("qwen35.rope.scaling.factor", "float32", 1.0),
    Kv("qwen35.rope.scaling.attn_factor", "float32", 1.0),
    Kv("qwen35.attention.causal", "bool", value=True),
    Kv("qwen35.pooling_type", "uint32", 0),
    Kv("qwen35.attention.sliding_window", "uint32", 0),
    Kv("general.sampling.penalty_repeat", "float32", 1.0),
    Kv("general.sampling.mirostat", "int32", 0),
    Kv("tokenizer.ggml.add_eos_token", "bool", value=False),
    Kv("tokenizer.ggml.add_space_prefix", "bool", value=False),
)
STATED_OF_EXPERTS = (
    Kv("qwen35moe.expert_gating_func", "uint32", 1),
    Kv("qwen35moe.expert_weights_norm", "bool", value=True),
    Kv("qwen35moe.expert_group_count", "uint32", 1),
    Kv("qwen35moe.expert_shared_count", "uint32", 1),
)
SMALL = ("nano-q8_0", "wide-q4_k_m")
TEXT: dict[str, tuple[tuple[str, ...], OfPairs]] = {
    "sizes by block": (SMALL, _by_block),
    "sections unsigned": (
        ("nano-q8_0",),
        recast("qwen35.rope.dimension_sections", "array[uint32]"),
    ),
    "layers as numbers": (
        ("wide-bf16",),
        recast("qwen35.attention.recurrent_layers", "array[int32]", lambda v: list(map(int, v))),
    ),
    "what is absent stated": (SMALL, put(*STATED)),
    "what experts do stated": (("moe-q8_0", "moe-mxfp4_moe"), put(*STATED_OF_EXPERTS)),
    "records of a tool": (("nano-q8_0", "wide-split"), put(*OF_A_TOOL)),
    "tokens of the middle": (("nano-q8_0",), _middle_tokens),
    "token of the begin": (("nano-q8_0", "wide-split"), _begin),
    "vocabulary stated": (
        ("wide-bf16",),
        put(Kv("qwen35.vocab_size", "uint32", 512)),
    ),
    "context before scaling stated": (("nano-q8_0",), _original_context),
    "template without its last line end": (
        ("nano-q8_0",),
        recast(TEMPLATE, "string", lambda text: text.rstrip("\n")),
    ),
    "types not stated": (
        ("nano-q8_0",),
        _without("general.type", "general.file_type", "general.quantization_version"),
    ),
    "scores": (("nano-q8_0",), _scores),
}
