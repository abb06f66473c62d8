"""tokenizer.json, loaded by the `tokenizers` library, as transformers, vLLM and SGLang do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from formats.errors import FormatError
from formats.side_names import TOKENIZER

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PANIC = "PanicException"
PREFACE = "Cannot instantiate Tokenizer from buffer: "


def read_tokenizer(content: bytes) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json. FormatError if the library refuses it."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_buffer(content)
    except BaseException as error:
        # tokenizers raises plain Exception for a bad file, and what is none of Rust's panics
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        why = str(error).removeprefix(PREFACE)
        fix = "take it from the original repository, or save it again with transformers"
        raise FormatError(TOKENIZER, f"is not a tokenizer ({why})", fix=fix) from None
