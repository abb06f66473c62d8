"""Text that a checkpoint or an artifact generates in the embedded runtime."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from qwen35_convert.errors import RecipeError
from qwen35_convert.options import check_choice
from qwen35_convert.text.tokens import chat_prompt, decode_stream, open_tokenizer, stop_ids

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16")
MAX_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and how to generate from it.

    chat         render the text as a user's turn of the chat template
    temperature  0 is greedy
    speculate    how many tokens the MTP head drafts in a step; the text is the same
    dtype        float32 or bfloat16; None: float32 on a CPU, the artifact's on a GPU
    """

    text: str
    chat: bool = False
    max_tokens: int = MAX_TOKENS
    temperature: float = 0.0
    seed: int = 0
    speculate: int = 0
    dtype: str | None = None


def generate_text(checkpoint: Checkpoint, prompt: Prompt) -> Iterator[str]:
    """Yield the text that follows, piece by piece.

    RecipeError for an invalid prompt, FormatError for a checkpoint that cannot generate.
    """
    import torch

    from runtime.load import load_model
    from runtime.serve.engine import generate
    from runtime.serve.sample import Sampling

    check_head(checkpoint)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = open_tokenizer(checkpoint)
    request = utf8(prompt.text)
    text = chat_prompt(checkpoint, request) if prompt.chat else request
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    model = load_model(checkpoint, device, _dtype(prompt.dtype, device), keep_fp8=device == "cuda")
    tokens = generate(
        model,
        ids,
        prompt.max_tokens,
        sampling=Sampling(prompt.temperature, seed=prompt.seed),
        stop=stop_ids(checkpoint, tokenizer),
        speculate=prompt.speculate,
    )
    yield from decode_stream(tokenizer, tokens)


def utf8(text: str) -> str:
    """Return a text whose bytes a locale such as C could not decode. RecipeError if it is none."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError:
        raise RecipeError("the prompt", "is not UTF-8", "text in UTF-8") from None


def check_head(checkpoint: Checkpoint) -> None:
    """Raise FormatError for a model without a head: it predicts nothing."""
    if checkpoint.layout.headless:
        raise FormatError(
            str(checkpoint.place),
            f"is a {checkpoint.config.raw['architectures'][0]}, which has no head",
            "a model that predicts tokens",
            "take it for embeddings: sentence-transformers, vLLM, llama.cpp; verify by tensors",
        )


def _dtype(name: str | None, device: str) -> torch.dtype:
    import torch

    name = name or ("bfloat16" if device == "cuda" else "float32")
    check_choice("dtype", name, DTYPES)
    dtype: torch.dtype = getattr(torch, name)
    return dtype
