"""What files beside tokenizer.json say of tokens otherwise than it does, without a source.

Ids are found by the text of a token: models have different ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.planted.artifact import Artifact
from tests.planted.fault import ALONE, STRUCTURE, Fault, Where, in_bases
from tests.planted.side_field_faults import GENERATION, TOKENIZER, TOKENIZER_CONFIG

Ids = dict[str, int]
Plan = Callable[[Any, Ids], object]
"""A change of a file's object, or what is written instead of it, given the ids of all tokens."""
VOCAB, MERGES, ADDED = "vocab.json", "merges.txt", "added_tokens.json"
SPECIAL, CONFIG = "special_tokens_map.json", "config.json"
HOMES = in_bases(
    "nano-fp8-block", "nano-fp8-block-hub", "wide-fp8-channel", "moe-bf16-split", "wide-mixed"
)
WITH_VISION = in_bases("nano-fp8-block-hub", "moe-fp8-block-hub")
END, TEXT_END = "<|im_end|>", "<|endoftext|>"


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, (file, wanted, plan) in EVERYWHERE.items():
        yield _fault(name, file, wanted, plan)
    for name, (file, wanted, plan) in PLACES.items():
        yield _fault(name, file, wanted, plan, WITH_VISION)


def _fault(name: str, file: str, wanted: str, plan: Plan, where: Where = HOMES) -> Fault:
    plant = partial(_plant, file=file, wanted=wanted, plan=plan)
    return Fault("tokens, alone", name, plant, where, STRUCTURE, receipts=(ALONE,))


def _plant(artifact: Artifact, file: str, wanted: str, plan: Plan) -> tuple[str, ...]:
    tokenizer = json.loads(artifact.file(TOKENIZER).read_bytes())
    ids = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    old = artifact.file(file)
    value = json.loads(old.read_bytes()) if old.is_file() and old.suffix == ".json" else tokenizer
    made = plan(value, ids)
    content = made if isinstance(made, str) else json.dumps(value if made is None else made)
    artifact.write(file, content)
    return file, wanted


def _vocab_of(change: Callable[[dict[str, int]], object]) -> Plan:
    """Return a plan that makes vocab.json of the tokenizer's, and changes it."""

    def plan(_: Any, ids: Ids) -> Any:
        vocab = {text: i for text, i in ids.items() if not text.startswith("<|")}
        change(vocab)
        return vocab

    return plan


def _swapped(vocab: dict[str, int]) -> None:
    one, two = list(vocab)[300:302]
    vocab[one], vocab[two] = vocab[two], vocab[one]


def _merges_of(change: Callable[[list[str]], object]) -> Plan:
    """Return a plan that makes merges.txt of the tokenizer's merges, and changes their lines."""

    def plan(tokenizer: Any, _: Ids) -> str:
        merges = tokenizer["model"]["merges"]
        lines = [one if isinstance(one, str) else " ".join(one) for one in merges]
        change(lines)
        return "\n".join(["#version: 0.2", *lines, ""])

    return plan


def _in_text(field: str, value: Any) -> Plan:
    """Return a plan that puts a field into the text part of config.json."""
    return lambda config, ids: (config.get("text_config") or config).update(
        {field: value(ids) if callable(value) else value}
    )


def _put(field: str, value: Any) -> Plan:
    return lambda config, ids: config.update({field: value(ids) if callable(value) else value})


def _beyond(ids: Ids) -> int:
    """Return an id that the embedding has a row for, and the tokenizer no token."""
    return max(ids.values()) + 2


def _moved(config: Any, _: Ids) -> None:
    """Move the ids of all listed tokens by one."""
    listed = config["added_tokens_decoder"]
    config["added_tokens_decoder"] = {str(int(i) + 1): token for i, token in listed.items()}


EVERYWHERE: dict[str, tuple[str, str, Plan]] = {
    "vocabulary-swapped": (VOCAB, "the id of", _vocab_of(_swapped)),
    "vocabulary-a-token-less": (VOCAB, "lacks", _vocab_of(lambda v: v.pop(list(v)[99]))),
    "vocabulary-a-token-more": (VOCAB, "'zyxqu'", _vocab_of(lambda v: v.update(zyxqu=7))),
    "merges-halved": (MERGES, "merges, but", _merges_of(lambda m: m.__delitem__(slice(99, None)))),
    "merges-turned": (MERGES, "merge 1 is", _merges_of(lambda m: m.reverse())),
    "a-merge-lost": (MERGES, "merge 5 is", _merges_of(lambda m: m.pop(4))),
    "added-tokens-moved": (
        ADDED,
        f"the id of '{END}'",
        lambda _, ids: {TEXT_END: ids[TEXT_END], END: ids[END] + 1},
    ),
    "added-token-invented": (ADDED, "'<|new|>'", lambda _, ids: {"<|new|>": _beyond(ids)}),
    "listed-tokens-moved": (TOKENIZER_CONFIG, "added_tokens_decoder: the id of", _moved),
    "end-token-unknown": (TOKENIZER_CONFIG, "eos_token is", _put("eos_token", "<|im_stop|>")),
    "pad-token-unknown": (TOKENIZER_CONFIG, "pad_token is", _put("pad_token", "[PAD]")),
    "begin-token-with-flags-unknown": (
        TOKENIZER_CONFIG,
        "bos_token is '<s>'",
        _put("bos_token", {"content": "<s>", "lstrip": False}),
    ),
    "more-tokens-unknown": (
        TOKENIZER_CONFIG,
        "'<|tool|>'",
        _put("additional_special_tokens", [END, "<|tool|>"]),
    ),
    "tokens-by-name-unknown": (
        TOKENIZER_CONFIG,
        "'<|new|>'",
        _put("extra_special_tokens", {"image_token": "<|new|>"}),
    ),
    "map-of-another-end": (
        SPECIAL,
        f"eos_token is '{TEXT_END}'",
        lambda *_: {"eos_token": TEXT_END},
    ),
    "map-of-an-unknown-pad": (SPECIAL, "pad_token is", lambda *_: {"pad_token": "[PAD]"}),
    "end-without-a-token": (CONFIG, "eos_token_id", _in_text("eos_token_id", _beyond)),
    "pad-without-a-token": (CONFIG, "pad_token_id", _in_text("pad_token_id", _beyond)),
    "begin-without-a-token": (CONFIG, "bos_token_id", _in_text("bos_token_id", _beyond)),
    "an-end-without-a-token": (
        GENERATION,
        "eos_token_id",
        _put("eos_token_id", lambda ids: [ids[END], _beyond(ids)]),
    ),
    "generation-s-pad-without-a-token": (
        GENERATION,
        "pad_token_id",
        _put("pad_token_id", _beyond),
    ),
}
PLACES: dict[str, tuple[str, str, Plan]] = {
    f"{kind}-in-place-of-another": (
        CONFIG,
        f"{kind}_token_id",
        _put(f"{kind}_token_id", lambda ids: ids[END]),
    )
    for kind in ("image", "video", "vision_start", "vision_end")
}
