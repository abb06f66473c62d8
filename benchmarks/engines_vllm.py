"""vLLM's own process for `benchmarks.engines`: run as a module with the arguments JOB and RESULT.

JOB is JSON: folder, type of the cache, attention backend (null: vLLM's choice), rows of token ids,
prompts of token ids, tokens to generate.
RESULT becomes JSON: the perplexity of the rows, the tokens that follow each prompt, the scales of
an FP8 cache as they were loaded, versions, seconds to load.
What vLLM says of itself goes to stderr.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

# no compiler of kernels and no downloads: the machine has neither CUDA's headers nor a network
ENVIRONMENT = {
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CACHE_BYTES = 2 * 10**9
ATTENTION = re.compile(r"(?<!mtp\.)layers\.\d+\.self_attn")
FREE_MEMORY = 0.02  # what vLLM demands at the start, of all: others run on the same card


def main(job: Path, result: Path) -> None:
    """Load the folder of a job, and measure it."""
    os.environ |= ENVIRONMENT
    from vllm import SamplingParams

    spec = json.loads(job.read_bytes())
    started = time.perf_counter()
    engine = _engine(spec)
    loaded = time.perf_counter() - started
    greedy = SamplingParams(
        temperature=0.0, max_tokens=spec["new_tokens"], ignore_eos=True, detokenize=False
    )
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    scores = engine.generate(_prompts(spec["rows"]), scored, use_tqdm=False)
    texts = engine.generate(_prompts(spec["prompts"]), greedy, use_tqdm=False)
    found = {
        "ppl": perplexity(spec["rows"], [one.prompt_logprobs for one in scores]),
        "tokens": [list(one.outputs[0].token_ids) for one in texts],
        "scales": _scales(engine) if spec["cache"] != "auto" else {},
        "load_s": round(loaded, 1),
        "versions": {name: metadata.version(name) for name in ("vllm", "torch", "triton")},
    }
    result.write_text(json.dumps(found))


def _engine(spec: dict[str, Any]) -> Any:
    from vllm import LLM

    longest = max(map(len, [*spec["rows"], *spec["prompts"]])) + spec["new_tokens"]
    return LLM(
        model=spec["folder"],
        dtype="bfloat16",
        kv_cache_dtype=spec["cache"],
        attention_backend=spec["attention"],
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=longest,
        max_num_seqs=len(spec["rows"]),
        max_num_batched_tokens=longest * len(spec["rows"]),
        enable_prefix_caching=False,
        kv_cache_memory_bytes=CACHE_BYTES,
        gpu_memory_utilization=FREE_MEMORY,
        limit_mm_per_prompt={"image": 0, "video": 0},
        additional_config={"gdn_prefill_backend": "triton"},
    )


def _scales(engine: Any) -> dict[str, list[float]]:
    """Return the scales of keys and of values that the engine's attentions have."""
    found: dict[str, list[float]] = engine.apply_model(cache_scales)[0]
    return found


def cache_scales(model: Any) -> dict[str, list[float]]:
    """Return them from vLLM's model, by attention, as `layers.3.self_attn`."""
    return {
        attention.group(0): [float(module._k_scale), float(module._v_scale)]
        for name, module in model.named_modules()
        if (attention := ATTENTION.search(name)) and hasattr(module, "_k_scale")
    }


def _prompts(rows: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": ids} for ids in rows]


def perplexity(rows: list[list[int]], scores: list[list[dict[int, Any] | None]]) -> float:
    """Return exp of the mean loss of all tokens but the first of each row.

    scores  for each token of a row the log-probabilities by token id, as vLLM returns them
    """
    losses = [
        -one[token].logprob
        for ids, row in zip(rows, scores, strict=True)
        for token, one in zip(ids, row, strict=True)
        if one is not None
    ]
    assert len(losses) == sum(len(ids) - 1 for ids in rows), "a token has no log-probability"
    return math.exp(math.fsum(losses) / len(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
