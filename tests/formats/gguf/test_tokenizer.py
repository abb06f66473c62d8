"""A tokenizer in a GGUF file: what is written of it, what is refused, and the files made again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from formats.errors import FormatError
from formats.gguf.bpe_tokenizer import library_ids
from formats.gguf.file import GgufFile, build_header
from formats.gguf.header import Kv
from formats.gguf.pre_tokenizer import REGEXES, pre_type, same_regex
from formats.gguf.tokenizer import tokenizer_metadata
from formats.gguf.tokenizer_files import tokenizer_files
from tests.gguf_reader import read_gguf

NANO = Path(__file__).parents[2] / "data" / "nano-dense"
ROWS = 2048
IM_END, ENDOFTEXT = 1986, 1984
Raw = dict[str, Any]
Change = Callable[[Raw], object]

TEXTS = (
    "In the beginning God created the heaven and the earth.",
    "It's we'RE they'll I'D 'tis o'clock",
    "cafe\u0301 z\u0335\u0321a\u0308\u0304l",
    "\u0939\u093f\u0928\u094d\u0926\u0940 \u0e01\u0e34\u0e19",
    "1234567890 3.14159 \u0663\u0664 \u00bd \u2167",
    " \t  two  spaces\n\n\n   and\r\n\r\nlines \n",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|><|im_start|",
    "def f(x):\n    return {k: v for k, v in x.items() if v != 0}  # ok\n",
    "\u5929\u5730\u7384\u9ec4\u3001\u5b87\u5b99\u6d2a\u8352\u3002",
    "\ud55c\uad6d\uc5b4 \u65e5\u672c\u8a9e",
    "\U0001f680\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f",
    "\x00\x07\ufeff\u00a0\u3000\u2028",
    "",
)


def side_files(**changes: Change) -> dict[str, bytes]:
    """Return the bundled model's side files; `tokenizer_json=f` lets f change tokenizer.json."""
    files = {
        path.name: path.read_bytes() for path in NANO.iterdir() if path.suffix != ".safetensors"
    }
    for key, change in changes.items():
        name = f"{key.removesuffix('_json')}.json"
        raw = json.loads(files[name])
        change(raw)
        files[name] = json.dumps(raw).encode()
    return files


def metadata(files: dict[str, bytes] | None = None, raw: Raw | None = None) -> dict[str, Kv]:
    files = side_files() if files is None else files
    raw = json.loads(files["config.json"]) if raw is None else raw
    return {kv.key: kv for kv in tokenizer_metadata(files, ROWS, raw).pairs}


def changed(**changes: Change) -> dict[str, Kv]:
    return metadata(side_files(**changes))


def add(raw: Raw, content: str, number: int, **flags: object) -> None:
    token = raw["added_tokens"][0] | {"content": content, "id": number} | flags
    raw["added_tokens"].append(token)


def split(raw: Raw) -> Raw:
    step: Raw = raw["pre_tokenizer"]["pretokenizers"][0]
    return step


def load(content: bytes) -> Tokenizer:
    return Tokenizer.from_buffer(content)


def same_ids(one: Tokenizer, other: Tokenizer, text: str) -> None:
    ids = one.encode(text, add_special_tokens=False).ids
    assert other.encode(text, add_special_tokens=False).ids == ids
    for skip in (False, True):
        assert other.decode(ids, skip_special_tokens=skip) == one.decode(
            ids, skip_special_tokens=skip
        )


# What is written


def test_keys_kinds_and_order_are_llama_cpps():
    kv = metadata()
    assert [(pair.key, pair.kind) for pair in kv.values()] == [
        ("tokenizer.ggml.model", "string"),
        ("tokenizer.ggml.pre", "string"),
        ("tokenizer.ggml.tokens", "array[string]"),
        ("tokenizer.ggml.token_type", "array[int32]"),
        ("tokenizer.ggml.merges", "array[string]"),
        ("tokenizer.ggml.eos_token_id", "uint32"),
        ("tokenizer.ggml.padding_token_id", "uint32"),
        ("tokenizer.ggml.add_bos_token", "bool"),
        ("tokenizer.chat_template", "string"),
    ]
    assert kv["tokenizer.ggml.model"].value == "gpt2"
    assert kv["tokenizer.ggml.pre"].value == "qwen35"
    assert kv["tokenizer.ggml.eos_token_id"].value == IM_END
    assert kv["tokenizer.ggml.padding_token_id"].value == ENDOFTEXT
    assert kv["tokenizer.ggml.add_bos_token"].value is False


def test_every_row_of_the_embedding_has_a_token():
    kv = metadata()
    tokens, types = kv["tokenizer.ggml.tokens"].value, kv["tokenizer.ggml.token_type"].value
    known = load((NANO / "tokenizer.json").read_bytes())
    assert len(tokens) == len(types) == ROWS
    for i, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        expected = known.id_to_token(i)
        assert token == (f"[PAD{i}]" if expected is None else expected)
        assert kind == (5 if expected is None else 3 if i >= ENDOFTEXT else 1)


def test_the_gguf_package_reads_what_is_written(tmp_path: Path):
    kv = metadata()
    path = tmp_path / "vocabulary.gguf"
    arch = Kv("general.architecture", "string", "qwen35")
    path.write_bytes(build_header([arch, *kv.values()], [])[0])
    reader = read_gguf(path)
    for key, pair in kv.items():
        assert reader.fields[key].contents() == pair.value
    assert {key: GgufFile(path).kv[key] for key in kv} == kv


def test_special_keys_are_the_gguf_packages():
    def name_all(raw: Raw) -> None:
        kinds = ("bos", "eos", "unk", "sep", "pad", "mask")
        raw |= {f"{kind}_token": "<|im_end|>" for kind in kinds}

    keys = gguf.Keys.Tokenizer
    found = [key for key, kv in changed(tokenizer_config=name_all).items() if kv.value == IM_END]
    assert found == [
        keys.BOS_ID,
        keys.EOS_ID,
        keys.UNK_ID,
        keys.SEP_ID,
        keys.PAD_ID,
        keys.MASK_ID,
    ]


def test_added_tokens_are_control_if_special_or_if_they_look_like_it():
    def more(raw: Raw) -> None:
        add(raw, "<think>", 1991, special=False)
        add(raw, "<|fim_pad|>", 1992, special=False)
        add(raw, "<mask>", 1993, special=True)

    kv = changed(tokenizer_json=more)
    assert kv["tokenizer.ggml.token_type"].value[1990:1995] == [3, 4, 3, 3, 5]
    assert kv["tokenizer.ggml.tokens"].value[1991:1994] == ["<think>", "<|fim_pad|>", "<mask>"]


def test_an_added_token_may_be_in_tokenizer_config_alone():
    def more(raw: Raw) -> None:
        plain = raw["added_tokens_decoder"]["1984"]
        raw["added_tokens_decoder"]["1991"] = plain | {"content": "<tool>", "special": False}

    kv = changed(tokenizer_config=more)
    assert kv["tokenizer.ggml.tokens"].value[1991] == "<tool>"
    assert kv["tokenizer.ggml.token_type"].value[1991] == 4


def test_merges_may_be_pairs_or_strings():
    def as_strings(raw: Raw) -> None:
        pairs = [" ".join(pair) for pair in raw["model"]["merges"]]
        raw["model"]["merges"] = ["#version: 0.2", *pairs]

    assert changed(tokenizer_json=as_strings) == metadata()
    assert metadata()["tokenizer.ggml.merges"].value[:2] == ["t h", "\u0120 th"]


def test_a_space_in_a_merge_becomes_what_a_space_is_in_byte_level_text():
    def spaced(raw: Raw) -> None:
        raw["model"]["vocab"] |= {"a b": 1984, "a bc": 1985}
        for token in raw["added_tokens"]:
            token["id"] += 2
        raw["model"]["merges"].append(["a b", "c"])

    files = side_files(tokenizer_json=spaced)
    del files["tokenizer_config.json"]
    assert metadata(files)["tokenizer.ggml.merges"].value[-1] == "a\u0120b c"


def test_config_json_names_what_tokenizer_config_does_not():
    raw = {
        "pad_token_id": 7,
        "bos_token_id": None,
        "eos_token_id": [1, 2],
        "text_config": {"bos_token_id": 5, "pad_token_id": 6, "eos_token_id": 9},
    }
    files = side_files(tokenizer_config=lambda config: config.pop("pad_token"))
    kv = metadata(files, raw)
    assert kv["tokenizer.ggml.padding_token_id"].value == 7
    assert kv["tokenizer.ggml.bos_token_id"].value == 5
    assert kv["tokenizer.ggml.eos_token_id"].value == IM_END


def test_special_tokens_may_be_objects():
    kv = changed(tokenizer_config=lambda raw: raw.update(bos_token={"content": "<|im_start|>"}))
    assert kv["tokenizer.ggml.bos_token_id"].value == 1985


def template_processing(first: str | None, last: str | None) -> Raw:
    ends = [[{"SpecialToken": {"id": x, "type_id": 0}}] if x else [] for x in (first, last)]
    return {
        "type": "TemplateProcessing",
        "single": [*ends[0], {"Sequence": {"id": "A", "type_id": 0}}, *ends[1]],
    }


BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}


@pytest.mark.parametrize(
    ("post", "flags"),
    [
        (BYTE_LEVEL, {"bos": False, "eos": False}),
        (template_processing(None, None), {"bos": False}),
        (template_processing("<|im_start|>", None), {"bos": True}),
        (template_processing("<|im_start|>", "<|im_end|>"), {"bos": True, "eos": True}),
        (
            {
                "type": "Sequence",
                "processors": [BYTE_LEVEL, template_processing(None, "<|im_end|>")],
            },
            {"bos": False, "eos": True},
        ),
    ],
)
def test_what_is_put_around_a_text_is_the_post_processors(post: Raw, flags: dict[str, bool]):
    kv = changed(tokenizer_json=lambda raw: raw.update(post_processor=post))
    assert {key: pair.value for key, pair in kv.items() if "add_" in key} == {
        f"tokenizer.ggml.add_{kind}_token": value for kind, value in flags.items()
    }


def test_a_text_may_end_with_another_token_than_a_turn():
    post = template_processing(None, "<|endoftext|>")
    kv = changed(tokenizer_json=lambda raw: raw.update(post_processor=post))
    assert kv["tokenizer.ggml.eos_token_id"].value == ENDOFTEXT
    assert kv["tokenizer.ggml.eot_token_id"].value == IM_END


def test_the_chat_template_is_the_one_that_transformers_takes():
    jinja = (NANO / "chat_template.jinja").read_text()
    files = side_files(tokenizer_config=lambda raw: raw.update(chat_template="mine"))
    files["chat_template.json"] = b'{"chat_template": "older"}'
    assert metadata(files)["tokenizer.chat_template"].value == jinja
    del files["chat_template.jinja"]
    assert metadata(files)["tokenizer.chat_template"].value == "mine"
    files["tokenizer_config.json"] = side_files()["tokenizer_config.json"]
    assert metadata(files)["tokenizer.chat_template"].value == "older"
    del files["chat_template.json"]
    assert "tokenizer.chat_template" not in metadata(files)


def test_named_chat_templates_have_keys_of_their_own():
    listed = [{"name": "tool use", "template": "T"}, {"name": "default", "template": "D"}]
    files = side_files(tokenizer_config=lambda raw: raw.update(chat_template=listed))
    del files["chat_template.jinja"]
    kv = metadata(files)
    assert list(kv.values())[-3:] == [
        Kv("tokenizer.chat_template.tool_use", "string", "T"),
        Kv("tokenizer.chat_templates", "array[string]", ["tool_use"]),
        Kv("tokenizer.chat_template", "string", "D"),
    ]


# Which regex it is


@pytest.mark.parametrize("name", REGEXES)
def test_a_regex_is_known_in_any_spelling(name: str):
    regex = REGEXES[name]
    for old, new in (
        (r"\r\n", r"\n\r"),
        (r"\r", "\r"),
        (r"\p{L}", r"\p{Letter}"),
        (r"\p{N}", r"\pN"),
        (r"[\p{L}\p{M}]", r"[\p{M}\p{L}]"),
        (r"\p{N}|", r"[\p{N}]|"),
        (regex.split("|[^")[0], "'(?i:[sdmt]|ll|ve|re)"),
    ):
        step = {"type": "Split", "pattern": {"Regex": regex.replace(old, new)}}
        step |= {"behavior": "Isolated", "invert": False}
        last = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        assert pre_type({"type": "Sequence", "pretokenizers": [step, last]}) == name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"\p{N}|", r"\p{N}{1,3}|"),
        (r"[\r\n]*", r"[\r\n/]*"),
        (r"\p{L}", r"\p{Lu}"),
        ("(?i:", "(?:"),
        (r"[^\s", r"[\s"),
        (r"\s+(?!\S)|", ""),
    ],
)
def test_another_regex_is_another(old: str, new: str):
    for name, regex in REGEXES.items():
        assert old in regex
        assert not any(same_regex(regex.replace(old, new), known) for known in REGEXES.values()), (
            name
        )


def test_an_unknown_regex_is_named_with_the_known_ones():
    def cut(raw: Raw) -> None:
        split(raw)["pattern"] = {"Regex": r"\w+|\W+"}

    with pytest.raises(FormatError) as caught:
        changed(tokenizer_json=cut)
    for part in (r"\w+|\W+", "known qwen35: ", "known qwen2: ", "fix "):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "pre",
    [
        None,
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        {"type": "Sequence", "pretokenizers": [{"type": "Split"}]},
        "Split",
        {"type": "Sequence", "pretokenizers": [{"type": "Digits"}, {"type": "ByteLevel"}]},
    ],
)
def test_another_pre_tokenizer_is_refused(pre: object):
    with pytest.raises(FormatError, match="text is cut by"):
        pre_type(pre)


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: split(raw).update(behavior="Removed"),
        lambda raw: split(raw).update(pattern={"String": " "}),
        lambda raw: raw["pre_tokenizer"]["pretokenizers"][1].update(add_prefix_space=True),
        lambda raw: raw["pre_tokenizer"]["pretokenizers"][1].pop("use_regex"),
    ],
)
def test_a_pre_tokenizer_that_does_more_is_refused(change: Change):
    with pytest.raises(FormatError, match="text is cut by"):
        changed(tokenizer_json=change)


# What is refused


def model(**changes: object) -> Change:
    return lambda raw: raw["model"].update(changes)


def vocab(**changes: object) -> Change:
    return lambda raw: raw["model"]["vocab"].update(changes)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (model(type="WordPiece"), "the model is WordPiece, expected BPE"),
        (model(type="Unigram"), "the model is Unigram, expected BPE"),
        (lambda raw: raw.pop("model"), "model is missing"),
        (model(vocab={}), "model.vocab is missing or empty"),
        (model(merges=[]), "model.merges is missing or empty"),
        (model(merges=["a b c"]), "a merge is 'a b c', expected two parts"),
        (model(merges=[["a"]]), r"a merge is \['a'\], expected two parts"),
        (model(merges=[["a", 1]]), r"a merge is \['a', 1\], expected two parts"),
        (model(merges=[["q", "zz"]]), "needs 'zz', which the vocabulary does not have"),
        (model(merges=[["z", "z"]]), "needs 'zz', which the vocabulary does not have"),
        (model(byte_fallback=True), "model.byte_fallback is True, expected False"),
        (model(ignore_merges=True), "model.ignore_merges is True"),
        (model(end_of_word_suffix="</w>"), "model.end_of_word_suffix is '</w>'"),
        (vocab(a="1"), "'a' has the id '1', expected an integer from 0"),
        (vocab(a=-1), "'a' has the id -1"),
        (vocab(a=True), "'a' has the id True"),
        (vocab(zz=5), "'&' and 'zz' have the same id 5"),
        (lambda raw: add(raw, "<x>", 1990), "'<x>' and '<|video_pad|>' have the same id 1990"),
        (lambda raw: add(raw, "<x>", 7), r"'<x>' and '\(' have the same id 7"),
        (lambda raw: add(raw, "<|im_end|>", 1991), "'<|im_end|>' has two ids, 1986 and 1991"),
        (lambda raw: add(raw, "a", 1991), "'a' has the id 1991, but the tokenizers library gives"),
        (lambda raw: add(raw, "<x>", 1995), "'<x>' has the id 1995, but the tokenizers .* 1991"),
        (lambda raw: add(raw, "", 1991), "an added token is"),
        (lambda raw: add(raw, "<x>", "1991"), "an added token is"),
        (lambda raw: raw.update(added_tokens=["<x>"]), "an added token is '<x>'"),
        (lambda raw: raw.update(added_tokens={"<x>": 1}), "added_tokens is not a list"),
        (lambda raw: raw.update(normalizer={"type": "Lowercase"}), "the normalizer is"),
        (lambda raw: raw.update(post_processor={"type": "BertProcessing"}), "BertProcessing"),
        (lambda raw: raw.update(post_processor={"single": []}), "the post-processor is None"),
        (
            lambda raw: raw.update(
                post_processor=template_processing("<|im_end|>", None)
                | {"single": [{"SpecialToken": {"id": "<|im_end|>"}}]}
            ),
            "the post-processor makes",
        ),
        (vocab(**{"[PAD2047]": 1984}), "'<|endoftext|>' and '\\[PAD2047\\]' have the same id"),
    ],
)
def test_a_tokenizer_json_is_refused(change: Change, reason: str):
    reason = reason.replace("|", r"\|")
    with pytest.raises(FormatError, match=f"^tokenizer.json: .*{reason}"):
        changed(tokenizer_json=change)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda raw: raw.update(bos_token="<s>"),
            "bos_token is '<s>', which is not an added token",
        ),
        (lambda raw: raw.update(eos_token=7), "eos_token is 7, expected a token"),
        (lambda raw: raw.update(chat_template=7), "chat_template is int, expected text or a list"),
        (lambda raw: raw.update(chat_template=["x"]), "chat_template holds 'x'"),
        (
            lambda raw: raw.update(chat_template=[{"name": "a", "template": ""}] * 2),
            "chat_template has two templates named 'a'",
        ),
        (lambda raw: raw.update(added_tokens_decoder=[1]), "added_tokens_decoder is not an object"),
        (lambda raw: raw.update(added_tokens_decoder={"x": {}}), r"added_tokens_decoder\['x'\]"),
    ],
)
def test_a_tokenizer_config_is_refused(change: Change, reason: str):
    with pytest.raises(FormatError, match=f"^tokenizer_config.json: {reason}"):
        changed(tokenizer_config=change)


def test_the_vocabulary_may_not_be_larger_than_the_embedding():
    reason = r"'<\|video_pad\|>' has the id 1990, expected at most 1989: the embedding has 1990"
    with pytest.raises(FormatError, match=reason):
        tokenizer_metadata(side_files(), 1990, {})
    assert len(tokenizer_metadata(side_files(), 1991, {}).pairs[2].value) == 1991


def test_two_files_may_not_give_a_token_two_ids():
    def swap(raw: Raw) -> None:
        raw["added_tokens_decoder"]["1991"] = raw["added_tokens_decoder"].pop("1990")

    with pytest.raises(FormatError, match=r"'<\|video_pad\|>' has two ids, 1990 and 1991"):
        changed(tokenizer_config=swap)


def test_a_token_may_not_have_the_name_of_an_unused_id():
    def named(raw: Raw) -> None:
        add(raw, "[PAD2047]", 1991)

    with pytest.raises(FormatError, match=r"'\[PAD2047\]' is a token, and the name of the unused"):
        changed(tokenizer_json=named)


def test_a_special_id_beyond_the_embedding_is_refused():
    with pytest.raises(FormatError, match=r"config.json: mask_token_id is 2048, expected .* 2048"):
        metadata(raw={"mask_token_id": ROWS})


def test_only_the_bos_token_may_be_put_before_a_text():
    def other(raw: Raw) -> None:
        raw["post_processor"] = template_processing("<|im_start|>", None)

    files = side_files(
        tokenizer_json=other, tokenizer_config=lambda raw: raw.update(bos_token="<|im_end|>")
    )
    with pytest.raises(FormatError, match=r"puts '<\|im_start\|>' before a text"):
        metadata(files)


def test_without_tokenizer_json_the_error_says_what_is_there_instead():
    files = side_files()
    del files["tokenizer.json"]
    with pytest.raises(FormatError, match=r"tokenizer.json is missing\n.*\n.*transformers"):
        metadata(files)
    del files["vocab.json"]
    with pytest.raises(FormatError, match=r"missing\n.*\n.*the original repository"):
        metadata(files)
    with pytest.raises(FormatError, match=r"tokenizer\.model is SentencePiece"):
        metadata(files | {"tokenizer.model": b""})


def test_a_chat_template_that_is_no_text_is_refused():
    with pytest.raises(FormatError, match=r"chat_template\.jinja is not UTF-8"):
        metadata(side_files() | {"chat_template.jinja": b"\xff"})


# The files made again


def rebuilt(kv: dict[str, Kv] | None = None) -> dict[str, bytes]:
    return tokenizer_files(metadata() if kv is None else kv)


@pytest.mark.parametrize("text", TEXTS)
def test_the_files_made_again_give_the_same_ids(text: str):
    same_ids(load((NANO / "tokenizer.json").read_bytes()), load(rebuilt()["tokenizer.json"]), text)


ORIGINAL = load((NANO / "tokenizer.json").read_bytes())
REBUILT = load(rebuilt()["tokenizer.json"])
PIECES = st.sampled_from(
    ["<|im_end|>", "<|im", "'s", "'LL", " ", "\n", "\r\n", "a\u0301", "\u0939\u093f", "\u5929", "1"]
)


@given(st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=12))
def test_any_text_has_the_same_ids(parts: list[str]):
    same_ids(ORIGINAL, REBUILT, "".join(parts))


def test_transformers_reads_the_files_made_again(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    for name, content in rebuilt().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_bytes((NANO / "config.json").read_bytes())
    ours, theirs = (transformers.AutoTokenizer.from_pretrained(path) for path in (tmp_path, NANO))
    chat = [{"role": "user", "content": "In the beginning"}]
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(
        chat, tokenize=False
    )
    assert (ours.eos_token_id, ours.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id)


def test_the_side_files_are_as_they_were():
    kv = metadata() | {
        kv.key: kv
        for kv in (
            Kv("general.architecture", "string", "qwen35"),
            Kv("qwen35.context_length", "uint32", 262144),
            Kv("general.sampling.top_k", "int32", 20),
            Kv("general.sampling.top_p", "float32", 0.949999988079071),
            Kv("general.sampling.temp", "float32", 0.6000000238418579),
        )
    }
    files, original = rebuilt(kv), side_files()
    assert json.loads(files["tokenizer_config.json"]) == json.loads(
        original["tokenizer_config.json"]
    )
    assert files["chat_template.jinja"] == original["chat_template.jinja"]
    generation = json.loads(original["generation_config.json"])
    del generation["bos_token_id"]
    assert json.loads(files["generation_config.json"]) == generation


def test_the_files_made_again_give_the_same_pairs():
    again = {kv.key: kv for kv in tokenizer_metadata(rebuilt(), ROWS, {}).pairs}
    assert again.pop("tokenizer.ggml.add_eos_token").value is False
    assert again == metadata()


def test_tokens_that_are_not_special_come_back_so():
    def more(raw: Raw) -> None:
        add(raw, "<think>", 1991, special=False)
        add(raw, "<|fim_pad|>", 1992, special=False)

    files = side_files(tokenizer_json=more)
    made = load(rebuilt(metadata(files))["tokenizer.json"])
    text = "<|im_start|><think>a</think><|fim_pad|>"
    same_ids(load(files["tokenizer.json"]), made, text)
    assert made.decode(made.encode(text).ids) == "<think>a</think><|fim_pad|>"


def test_added_tokens_keep_their_ids_behind_a_gap():
    def shift(raw: Raw) -> None:
        for token in raw["added_tokens"]:
            token["id"] += 11
            raw["model"]["vocab"][token["content"]] = token["id"]

    files = side_files(tokenizer_json=shift)
    del files["tokenizer_config.json"]
    made = load(rebuilt(metadata(files, {}))["tokenizer.json"])
    assert made.token_to_id("<|im_end|>") == IM_END + 11
    for text in TEXTS:
        same_ids(load(files["tokenizer.json"]), made, text)


def test_an_added_token_that_merges_make_stays_in_the_vocabulary():
    def both(raw: Raw) -> None:
        add(raw, "th", raw["model"]["vocab"]["th"], special=False)

    files = side_files(tokenizer_json=both)
    made = load(rebuilt(metadata(files))["tokenizer.json"])
    for text in (*TEXTS, "the thick of it"):
        same_ids(load(files["tokenizer.json"]), made, text)


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 12), min_size=1).filter(
        lambda vocab: len(set(vocab.values())) == len(vocab)
    ),
    st.lists(st.sampled_from("abcdefghXYZ"), unique=True, max_size=6),
)
def test_the_library_gives_added_tokens_these_ids(vocab: dict[str, int], added: list[str]):
    raw = {
        "added_tokens": [
            {
                "id": 99 + i,
                "content": token,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for i, token in enumerate(added)
        ],
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    known = load(json.dumps(raw).encode())
    assert [known.token_to_id(token) for token in added] == library_ids(vocab, added)


def test_what_is_put_around_a_text_comes_back():
    files = side_files(
        tokenizer_json=lambda raw: raw.update(
            post_processor=template_processing("<|im_start|>", "<|im_end|>")
        )
    )
    made = load(rebuilt(metadata(files))["tokenizer.json"])
    assert made.encode("a").ids == [1985, *made.encode("a", add_special_tokens=False).ids, IM_END]


def test_named_chat_templates_come_back_where_transformers_looks_for_them():
    """It takes a list in tokenizer_config.json for nothing beside a chat_template.jinja."""
    files = side_files()
    files["additional_chat_templates/tool_use.jinja"] = b"T"
    assert metadata(files)["tokenizer.chat_template.tool_use"].value == "T"
    again = rebuilt(metadata(files))
    assert again["chat_template.jinja"] == files["chat_template.jinja"]
    assert again["additional_chat_templates/tool_use.jinja"] == b"T"
    assert "chat_template" not in json.loads(again["tokenizer_config.json"])


def test_a_template_that_no_list_names_comes_back_under_a_plain_name():
    key = "tokenizer.chat_template.../../x"
    files = tokenizer_files({key: Kv(key, "string", "T")})
    assert files == {"additional_chat_templates/______x.jinja": b"T"}


def test_qwen2s_regex_comes_back():
    def cut(raw: Raw) -> None:
        split(raw)["pattern"] = {"Regex": REGEXES["qwen2"]}

    files = side_files(tokenizer_json=cut)
    kv = metadata(files)
    assert kv["tokenizer.ggml.pre"].value == "qwen2"
    for text in TEXTS:
        same_ids(load(files["tokenizer.json"]), load(rebuilt(kv)["tokenizer.json"]), text)


@pytest.mark.parametrize("name", [None, "none", "no_vocab"])
def test_a_file_without_a_tokenizer_has_no_side_files(name: str | None):
    key = "tokenizer.ggml.model"
    assert tokenizer_files({} if name is None else {key: Kv(key, "string", name)}) == {}


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("model", "llama", "tokenizer.ggml.model is 'llama', expected 'gpt2'"),
        ("pre", "llama-bpe", "pre is 'llama-bpe', expected 'qwen35' or 'qwen2'"),
        ("pre", 3, r"pre is 3 \(string\), expected str"),
        ("tokens", None, "tokens is missing"),
        ("tokens", "abc", "tokens is abc"),
        ("tokens", ["a"] * ROWS, "tokens holds a token twice"),
        ("tokens", [1] * ROWS, "tokens is array"),
        ("token_type", [1], "token_type has 1 entries, expected 2048"),
        ("token_type", [6] * ROWS, "token_type holds 6"),
        ("merges", None, "merges is missing"),
        ("merges", ["ab"], "merges holds 'ab', expected two parts"),
        ("merges", ["t "], "merges holds 't ', expected two parts"),
        ("merges", ["q zz"], "merges needs 'zz', which tokenizer.ggml.tokens does not have"),
        ("eos_token_id", ROWS, "eos_token_id is 2048, expected an id below 2048"),
        ("add_bos_token", True, "add_bos_token is true, but there is no bos token"),
    ],
)
def test_pairs_that_make_no_tokenizer_are_refused(key: str, value: object, reason: str):
    kv = metadata()
    pair = kv.pop(f"tokenizer.ggml.{key}")
    if value is not None:
        kv[pair.key] = Kv(pair.key, pair.kind, value)
    with pytest.raises(FormatError, match=reason):
        tokenizer_files(kv)
