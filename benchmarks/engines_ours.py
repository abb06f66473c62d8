"""Our runtime's side of `benchmarks.engines`: the same tokens, and what they are taken from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from formats.checkpoint import Checkpoint

ROWS, WIDTH, PROMPT, NUM_PROMPTS, NEW_TOKENS = 4, 512, 64, 3, 32


def token_rows(source: Path, text: Path) -> dict[str, Any]:
    """Return the rows that are scored, and the prompts that are continued: what follows them."""
    from qwen35_convert.source import open_source
    from qwen35_convert.text.tokens import text_ids

    ids = text_ids(open_source(source)[0], str(text))
    needed = ROWS * WIDTH + NUM_PROMPTS * PROMPT
    assert len(ids) >= needed, f"{text} has {len(ids)} tokens, {needed} are needed"
    rest = ids[ROWS * WIDTH :]
    return {
        "rows": [ids[i * WIDTH : (i + 1) * WIDTH] for i in range(ROWS)],
        "prompts": [rest[i * PROMPT : (i + 1) * PROMPT] for i in range(NUM_PROMPTS)],
        "new_tokens": NEW_TOKENS,
    }


def ask_ours(source: Path, artifact: Path, spec: dict[str, Any], device: str) -> dict[str, Any]:
    """Return what our runtime computes of the artifact, and the source's perplexity."""
    import torch

    from qwen35_convert.source import open_source
    from runtime.compare import compare_logits

    opened, original = open_source(artifact)[0], open_source(source)[0]
    report = compare_logits(original, opened, torch.tensor(spec["rows"]), device=device)
    return {
        "ppl_ours": report.ppl_artifact,
        "ppl_source": report.ppl_source,
        "kl_ours": report.kl_mean,
        "tokens_ours": list(continued(opened, spec, device)),
        "scales_ours": cache_scales_of(opened),
    }


def cache_of(artifact: Path) -> str:
    """Return the type of the cache that an artifact asks engines for, as vLLM calls it."""
    from formats.family.cache_scales import has_fp8_cache
    from qwen35_convert.source import open_source

    return "fp8" if has_fp8_cache(open_source(artifact)[0].config) else "auto"


def cache_scales_of(checkpoint: Checkpoint) -> dict[str, list[float]]:
    """Return the scales of keys and of values by attention, as `layers.3.self_attn`."""
    from formats.family.cache_scales import SCALED, cache_scales
    from formats.read_scale import read_scale

    found = cache_scales(checkpoint.layout.activation_scales)
    return {
        attention: [float(read_scale(checkpoint, stored[what])) for what in SCALED]
        for attention, stored in found.items()
    }


def continued(checkpoint: Checkpoint, spec: dict[str, Any], device: str) -> Iterator[list[int]]:
    """Yield the tokens that follow each prompt, in the dtype of an engine on a GPU."""
    import torch

    from runtime.load import load_model
    from runtime.serve.engine import generate

    on_gpu = device == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = load_model(checkpoint, device, dtype, keep_fp8=on_gpu)
    for prompt in spec["prompts"]:
        yield list(generate(model, prompt, spec["new_tokens"]))
