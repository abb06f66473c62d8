"""The tokenizer of a GGUF file, held against itself where there is no source to compare with.

llama.cpp refuses a key of another kind than it reads; a tokenizer whose parts contradict each other
gives other ids than the model was trained with, or none.
"""

from __future__ import annotations

from collections.abc import Iterator

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.gguf.checkpoint import first_file
from formats.gguf.header import Kv
from formats.gguf.tokenizer_files import tokenizer_files
from qwen35_convert.containers.gguf.keys import NATURAL, kind_problem
from qwen35_convert.failure import Failure

SPACE = "tokenizer."
ARRAYS = {
    "tokenizer.ggml.tokens": "array[string]",
    "tokenizer.ggml.merges": "array[string]",
    "tokenizer.ggml.token_type": "array[int32]",
    "tokenizer.ggml.scores": "array[float32]",
}


def tokenizer_failures(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield keys of another kind; if there are none, what of the tokenizer cannot be."""
    file = first_file(artifact)
    pairs = [file.kv[key] for key in file.kv if key.startswith(SPACE)]
    problems = [problem for pair in pairs if (problem := _kind(pair))]
    if not problems:
        try:
            tokenizer_files(file.kv)
        except FormatError as error:
            problems = [error.without_fix()]
    yield from (Failure(file.path.name, problem) for problem in problems)


def _kind(pair: Kv) -> str | None:
    kind = ARRAYS.get(pair.key, NATURAL.get(type(pair.value)))
    return kind_problem(pair, kind) if kind else None
