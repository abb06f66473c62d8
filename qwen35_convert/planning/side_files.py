"""Side files read as what they are, before anything is written: each is part of the artifact.

    .json                 an object, its fields of the kinds that engines need (`side_kinds`);
                          modules.json a list; read as engines do, not as strictly as a config: a
                          key may stand twice; tokenizer.json as the library that engines load it
                          with reads it
    .jinja, chat_template a Jinja template, as engines compile it
    .txt, .md, no suffix  text, tokenizer.model anything: but none is a pointer of git-lfs

A model whose tokenizer is a pointer, half a download or a web page converts, and loads nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import PurePosixPath

from formats.chat_template import has_places, read_templates
from formats.checkpoint import Checkpoint
from formats.content import POINTER, content_of
from formats.embedder import check_modules
from formats.errors import FormatError
from formats.json_file import parse_object
from formats.safetensors.folder import DOCUMENTS
from formats.side_names import IMAGES, PROCESSOR, TOKENIZER
from qwen35_convert.planning.image_sizes import image_sizes
from qwen35_convert.planning.side_kinds import MEND, check_config, check_kinds
from qwen35_convert.planning.token_ids import check_ids
from qwen35_convert.planning.token_names import disagreements
from qwen35_convert.template import compile_template
from qwen35_convert.tokenizer_file import read_tokenizer

LISTS = ("modules.json",)
WORDS = {list: "a JSON list", dict: "a JSON object"}
UTF8 = (".jinja", ".txt")
ORIGINAL = "take the template from the original repository, or mend it there"
AGAIN = "fetch it again: qwen35 download OWNER/NAME -o DIR"
_right: set[tuple[str, bytes]] = set()  # names and hashes of files that were read and are right


def check_sides(source: Checkpoint) -> None:
    """Raise FormatError, naming the file, for one that is not what its name says.

    So it does for config.json, whose fields go along.
    """
    check_config(source)
    for name in source.side_names:
        check_side(name, source.sides[name])
    check_ids(source)
    check_modules(source.sides)
    templates = read_templates(source.sides)
    for name, text in templates.texts.items():
        try:
            compile_template(text, templates.where[name])
        except FormatError as error:
            raise FormatError(str(error), fix=ORIGINAL) from None


def side_notes(source: Checkpoint) -> Iterator[str]:
    """Yield what is to be known of the files that are carried along."""
    templates = read_templates(source.sides)
    yield from templates.notes
    for name, text in templates.texts.items():
        if not has_places(text):
            note = f"{templates.where[name]} says {text.strip()!r:.60} of every chat"
            yield f"{note}, and has no place for messages; {ORIGINAL}"
    for name, problem in disagreements(source):
        yield f"{name}: {problem}; {MEND}"


def token_notes(source: Checkpoint) -> Iterator[str]:
    """Yield that tokens were added for which the embedding has no row, if so."""
    content, rows = source.side(TOKENIZER), source.config.sizes["V"]
    ids = {} if content is None else _ids(content)
    beyond = sorted((number, text) for text, number in ids.items() if number >= rows)
    if beyond:
        number, text = beyond[-1]
        last = f"{text!r} with the id {number}"
        which = f"{len(beyond)} tokens, up to {last}, have" if beyond[1:] else f"{last} has"
        yield (
            f"{TOKENIZER}: {which} no row in the embedding of {rows} rows: engines fail on such a "
            "token; resize the embedding (resize_token_embeddings), or take the tokenizer that the "
            "model was trained with"
        )


def _ids(content: bytes) -> dict[str, int]:
    """Return the id of every token, as far as the file has the usual form."""
    from pydantic_core import from_json

    tokenizer = from_json(content, cache_strings="none")
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    pairs = [*(vocabulary.items() if isinstance(vocabulary, dict) else ())]
    entries = added if isinstance(added, list) else ()
    pairs += [(one.get("content"), one.get("id")) for one in entries if isinstance(one, dict)]
    return {str(text): number for text, number in pairs if isinstance(number, int)}


def image_notes(source: Checkpoint) -> Iterator[str]:
    """Yield that nothing says how images are prepared, or that something says it wrongly, if so."""
    for name, problem in image_sizes(source):
        yield f"{name}: {problem}: engines fail on images; {MEND}"
    content = source.side(PROCESSOR)
    nested = content is not None and "image_processor" in parse_object(content, PROCESSOR)
    if not nested and IMAGES not in source.sides:
        yield (
            f"vision is kept, but there is no {IMAGES} or {PROCESSOR} that says how images "
            "are prepared, which transformers, vLLM and SGLang need; copy it from the original "
            "repository"
        )


def check_side(name: str, content: bytes) -> None:
    """Raise FormatError for a side file that is not what its name says.

    A content is read once: a source and what is made of it have the same tokenizer of 20 MB.
    """
    known = name, sha256(content).digest()
    if known not in _right:
        _check_content(name, content)
        _right.add(known)


def _check_content(name: str, content: bytes) -> None:
    suffix, kind = PurePosixPath(name).suffix, content_of(content)
    if kind is not None and (kind is POINTER or name not in DOCUMENTS):
        raise FormatError(name, kind.what, fix=kind.fix)
    if name == TOKENIZER:
        _check_tokenizer(content)
    elif suffix == ".json":
        _check_json(name, content)
    elif suffix in UTF8:
        try:
            content.decode()
        except UnicodeDecodeError as error:
            raise FormatError(name, f"is not UTF-8 ({error.reason})", "text", AGAIN) from None


def _check_tokenizer(content: bytes) -> None:
    """Load it: of a file that cannot be, say first whether it is JSON."""
    try:
        read_tokenizer(content)
    except FormatError:
        _check_json(TOKENIZER, content)
        raise


def _check_json(name: str, content: bytes) -> None:
    from pydantic_core import from_json

    kind = list if name in LISTS else dict
    try:
        value = from_json(content, cache_strings="none")
    except ValueError as error:
        raise FormatError(name, f"is not JSON ({error})", WORDS[kind], AGAIN) from None
    if not isinstance(value, kind):
        raise FormatError(name, f"holds {type(value).__name__}", WORDS[kind], AGAIN)
    check_kinds(name, value)
