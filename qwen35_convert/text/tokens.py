"""Text to token ids and back, with a checkpoint's own tokenizer, chat template and stop tokens.

Stop tokens are the union of what generation_config.json, the tokenizer and config.json name: the
text config of Qwen3.5 says <|endoftext|>, a chat ends with <|im_end|>, and the small checkpoints
have no generation_config.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.chat_template import DEFAULT as DEFAULT_TEMPLATE
from formats.chat_template import read_templates
from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.json_file import parse_object
from formats.side_names import GENERATION, TEMPLATE, TOKENIZER, TOKENIZER_CONFIG
from qwen35_convert.errors import RecipeError
from qwen35_convert.template import compile_template
from qwen35_convert.tokenizer_file import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CHUNK = 512
DEFAULT = "default"
DEFAULT_TEXT = Path(__file__).parent / "default_text.txt"


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Return the tokenizer of a checkpoint. FormatError if it has none that can be read."""
    content = checkpoint.side(TOKENIZER)
    if content is None:
        raise FormatError(f"{checkpoint.folder}: {TOKENIZER} is missing, and text needs it")
    return read_tokenizer(content)


def text_path(text: str) -> Path:
    """Return the file of a text; `default` is the bundled one."""
    return DEFAULT_TEXT if text == DEFAULT else Path(text)


def text_ids(checkpoint: Checkpoint, text: str) -> list[int]:
    """Return the tokens of a text file (`default`: the bundled one), at least 2.

    RecipeError if the text cannot be read or is too short.
    """
    try:
        content = text_path(text).read_text(encoding="utf-8")
    except OSError as error:
        fix = "give a file of plain text, or leave it out for the bundled one"
        raise RecipeError(f"text {text}", f"cannot be read: {error.strerror}", fix=fix) from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"text {text}", f"is not UTF-8: {error.reason}") from None
    except ValueError as error:  # a name with a NUL
        raise RecipeError(f"text {text!r}", f"cannot be read: {error}") from None
    ids = open_tokenizer(checkpoint).encode(content, add_special_tokens=False).ids
    if len(ids) < 2:
        raise RecipeError(f"text {text}", f"has {len(ids)} tokens", "at least 2")
    return list(ids)


def chunked(ids: Sequence[int]) -> list[Sequence[int]]:
    """Return tokens in texts of 512, each run on its own; the last one has 2 at least."""
    return [ids[start : start + CHUNK] for start in range(0, len(ids) - 1, CHUNK)]


def chat_prompt(checkpoint: Checkpoint, prompt: str) -> str:
    """Return the prompt as one user turn in the checkpoint's default chat template."""
    from jinja2 import TemplateError

    templates = read_templates(checkpoint.sides)
    text, place = templates.default, checkpoint.folder
    if text is None:
        named = ", ".join(map(repr, templates.texts))
        got = f"has no default chat template, only {named}" if named else "has no chat template"
        raise FormatError(str(place), got, f"{TEMPLATE}, or chat_template in {TOKENIZER_CONFIG}",
                          "run without --chat")  # fmt: skip
    template = compile_template(text, templates.where[DEFAULT_TEMPLATE])
    messages = [{"role": "user", "content": prompt}]
    try:
        return template.render(
            messages=messages, add_generation_prompt=True, **_special_tokens(checkpoint)
        )
    except (TemplateError, TypeError) as error:
        raise FormatError(f"{place}: the chat template cannot be rendered: {error}") from None


def _special_tokens(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the tokens that templates may name: bos_token, eos_token and the like."""
    fields = _object(checkpoint, TOKENIZER_CONFIG).items()
    tokens = {key: value for key, value in fields if key.endswith("_token")}
    texts = {key: v.get("content") if isinstance(v, dict) else v for key, v in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def stop_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    """Return every token id that ends a text."""
    named = _special_tokens(checkpoint).get("eos_token")
    tokens = [] if named is None else [tokenizer.token_to_id(named)]
    config = checkpoint.config
    for part in (_object(checkpoint, GENERATION), config.text, config.raw):
        value = part.get("eos_token_id")
        tokens += value if isinstance(value, list) else [value]
    return frozenset(token for token in tokens if isinstance(token, int))


def _object(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    content = checkpoint.side(name)
    return {} if content is None else parse_object(content, name)


def decode_stream(tokenizer: Tokenizer, tokens: Iterable[int]) -> Iterator[str]:
    """Yield text as soon as tokens make whole characters."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)
    for token in tokens:
        piece = stream.step(tokenizer, token)
        if piece:
            yield piece
