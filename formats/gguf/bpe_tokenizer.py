"""tokenizer.json of the family: byte-level BPE, read strictly; how it cuts text has a name.

    text -> NFC -> added tokens cut out -> regex -> bytes as characters -> merges -> ids

llama.cpp knows the regex by a name ("qwen35"), and of the rest only what is here; whatever would
give other ids there is refused. Spellings of the same regex are the same.

Source: the published tokenizer.json; the `tokenizers` library. Trap: the library takes the id
of an added token from the vocabulary, or counts on from the vocabulary's length; not from its row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from formats.errors import FormatError
from formats.gguf.pre_tokenizer import FROM_ORIGINAL, pre_type
from formats.json_file import parse_object
from formats.side_names import TOKENIZER

# (field of the BPE model, values under which llama.cpp gives the same ids)
PLAIN_MODEL: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("dropout", (None, 0, 0.0)),
    ("unk_token", (None,)),
    ("byte_fallback", (None, False)),
    ("continuing_subword_prefix", (None, "")),
    ("end_of_word_suffix", (None, "")),
    ("ignore_merges", (None, False)),
)
SPACE = chr(ord(" ") + 256)  # as byte-level text has it
# What an added token may ask of the text around it, which GGUF cannot express: llama.cpp's
# converter leaves it out, and llama.cpp cuts the token out wherever it stands.
NEIGHBOURS = {
    "lstrip": "the white space before it",
    "rstrip": "the white space after it",
    "single_word": "the letters next to it",
}


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is cut out of the text before anything else.

    odd  what it asks of the text around it, of `NEIGHBOURS`
    """

    content: str
    id: int
    special: bool
    odd: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ends:
    """What the post-processor puts before and after a text; `said`: it says something of it."""

    first: str | None = None
    last: str | None = None
    stated: bool = False


@dataclass(frozen=True, slots=True)
class BpeTokenizer:
    """What tokenizer.json says. `merges` are "left right", `pre` is llama.cpp's name."""

    vocab: Mapping[str, int]
    added: tuple[AddedToken, ...]
    merges: list[str]
    pre: str
    ends: Ends

    @property
    def notes(self) -> Iterator[str]:
        """What llama.cpp does not do with the added tokens."""
        for field, what in NEIGHBOURS.items():
            tokens = [repr(token.content) for token in self.added if field in token.odd]
            if tokens:
                more = f" and {len(tokens) - 3} more" if len(tokens) > 3 else ""
                yield (
                    f"{TOKENIZER}: {', '.join(tokens[:3])}{more} has {field}, which no GGUF file "
                    f"can say: llama.cpp leaves {what} as it is"
                )


def read_tokenizer(content: bytes, more: Sequence[Mapping[str, Any]] = ()) -> BpeTokenizer:
    """Return the tokenizer in a tokenizer.json.

    more  the added tokens of tokenizer_config.json, in the same form; those of tokenizer.json win

    FormatError for what is no byte-level BPE, contradicts itself, or what llama.cpp has no way to
    do as well.
    """
    raw = parse_object(content, TOKENIZER)
    model = _model(raw)
    vocab = _vocab(model)
    _check_normalizer(raw.get("normalizer"))
    listed = raw.get("added_tokens") or []
    if not isinstance(listed, list):
        fail("added_tokens is not a list")
    added = tuple(_added([*listed, *more]))
    _check_ids(vocab, added)
    return BpeTokenizer(
        vocab,
        added,
        list(_merges(model, vocab)),
        pre_type(raw.get("pre_tokenizer")),
        _ends(raw.get("post_processor")),
    )


def fail(reason: str, fix: str = FROM_ORIGINAL) -> NoReturn:
    """Raise FormatError about tokenizer.json."""
    raise FormatError(f"{TOKENIZER}: {reason}\n  fix   {fix}")


def _model(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    model = raw.get("model")
    if not isinstance(model, dict):
        raise FormatError(f"{TOKENIZER}: model is missing")
    kind = model.get("type", "BPE")
    if kind != "BPE":
        fail(f"the model is {kind}, expected BPE; Qwen3.5 has no other")
    for field, plain in PLAIN_MODEL:
        if model.get(field) not in plain:
            fail(
                f"model.{field} is {model[field]!r}, expected {plain[-1]!r}: "
                "llama.cpp would tokenise differently"
            )
    return model


def _vocab(model: Mapping[str, Any]) -> Mapping[str, int]:
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not vocab:
        raise FormatError(f"{TOKENIZER}: model.vocab is missing or empty")
    for token, number in vocab.items():
        if type(number) is not int or number < 0:
            fail(f"{token!r} has the id {number!r}, expected an integer from 0")
    if len(set(vocab.values())) != len(vocab):
        number, _ = Counter(vocab.values()).most_common(1)[0]
        names = [repr(token) for token, its in vocab.items() if its == number]
        fail(f"{names[0]} and {names[1]} have the same id {number}")
    return vocab


def _check_normalizer(normalizer: object) -> None:
    for one in _steps(normalizer, "normalizers"):
        if one is not None and one != {"type": "NFC"}:
            fail(f"the normalizer is {one!r}, expected NFC")


def _steps(whole: object, field: str) -> list[Any]:
    """Return the steps of a sequence; anything else is its own only step."""
    if not isinstance(whole, dict) or whole.get("type") != "Sequence":
        return [whole]
    steps = whole.get(field)
    return steps if isinstance(steps, list) else [whole]


def _added(listed: Iterable[Any]) -> Iterator[AddedToken]:
    seen: dict[str, int] = {}
    for entry in listed:
        if not isinstance(entry, dict):
            fail(f"an added token is {entry!r}, expected an object")
        content, number = entry.get("content"), entry.get("id")
        if not isinstance(content, str) or not content or type(number) is not int or number < 0:
            fail(f"an added token is {entry!r}, expected a content and an id from 0")
        if content in seen and seen[content] != number:
            fail(f"{content!r} has two ids, {seen[content]} and {number}")
        if content in seen:
            continue
        seen[content] = number
        odd = tuple(field for field in NEIGHBOURS if entry.get(field))
        yield AddedToken(content, number, entry.get("special") is True, odd)


def _check_ids(vocab: Mapping[str, int], added: Sequence[AddedToken]) -> None:
    """Refuse added tokens whose ids are others' or are not those the library gives them."""
    owners = {number: token for token, number in vocab.items()}
    for token, number in zip(added, library_ids(vocab, [t.content for t in added]), strict=True):
        owner = owners.setdefault(token.id, token.content)
        if owner != token.content:
            fail(f"{token.content!r} and {owner!r} have the same id {token.id}")
        if number != token.id:
            fail(
                f"{token.content!r} has the id {token.id}, but the tokenizers library gives it "
                f"{number}",
                "put added tokens into model.vocab, or leave no id out",
            )


def library_ids(vocab: Mapping[str, int], added: Sequence[str]) -> list[int]:
    """Return the ids that the `tokenizers` library gives added tokens when it loads them."""
    new = [content for content in added if content not in vocab]
    following = {content: number for number, content in enumerate(new, len(vocab))}
    return [vocab[content] if content in vocab else following[content] for content in added]


def _merges(model: Mapping[str, Any], vocab: Mapping[str, int]) -> Iterator[str]:
    """Yield "left right"; a space inside a part becomes what a space is in byte-level text."""
    merges = model.get("merges")
    if not isinstance(merges, list) or not merges:
        raise FormatError(f"{TOKENIZER}: model.merges is missing or empty")
    for merge in merges:
        if isinstance(merge, str) and merge.startswith("#version"):
            continue
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if type(pair) is not list or [*map(type, pair)] != [str, str]:
            fail(f"a merge is {merge!r}, expected two parts")
        left, right = pair
        both = left + right
        if left not in vocab or right not in vocab or both not in vocab:
            lost = next(part for part in (left, right, both) if part not in vocab)
            fail(f"the merge {merge!r} needs {lost!r}, which the vocabulary does not have")
        if " " in both:
            left, right = left.replace(" ", SPACE), right.replace(" ", SPACE)
        yield f"{left} {right}"


def _ends(post_processor: object) -> Ends:
    """Return what is put around a text: nothing, or one token before or after it."""
    ends = Ends()
    for step in _steps(post_processor, "processors"):
        kind = step.get("type") if isinstance(step, dict) else step
        if isinstance(step, dict) and kind == "TemplateProcessing":
            ends = _template(step.get("single"), stated=ends.stated)
        elif kind == "ByteLevel":
            ends = Ends(ends.first, ends.last, stated=True)
        elif step is not None:
            fail(f"the post-processor is {kind}, expected ByteLevel or TemplateProcessing")
    return ends


def _template(single: object, *, stated: bool) -> Ends:
    """Return the ends of a template such as `<s> $A </s>`."""
    pieces = [p for p in single if isinstance(p, dict)] if isinstance(single, list) else []
    names = [_special_of(piece) for piece in pieces]
    if names.count(None) != 1 or len(names) > 3 or None not in names[:2] or None not in names[-2:]:
        fail(f"the post-processor makes {single!r} of a text, expected one token before and after")
    return Ends(names[0], names[-1] if len(names) > 1 else None, stated=stated)


def _special_of(piece: Mapping[str, Any]) -> str | None:
    """Return the token of a piece of a template, None for the text itself."""
    special = piece.get("SpecialToken")
    name = special.get("id") if isinstance(special, dict) else None
    if not isinstance(name, str) and "Sequence" not in piece:
        fail(f"the post-processor puts {piece!r} around a text, expected a token")
    return name if isinstance(name, str) else None
