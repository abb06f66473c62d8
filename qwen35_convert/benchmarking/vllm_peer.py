"""vLLM's own process for `bench --peer vllm`: run as a module with the arguments JOB and RESULT.

JOB is JSON: folder, vocabulary, repeat, points. RESULT becomes a list of milliseconds. A prompt is
timed to its first token. A decode step is the time each of NEW more tokens adds: vLLM does not
report single steps, and the difference excludes the prompt and the overhead of a request.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NEW = 64


def main(job: Path, result: Path) -> None:
    """Time every point of a job."""
    spec = json.loads(job.read_bytes())
    engine = _engine(spec)
    times = [_point_ms(engine, point, spec) for point in spec["points"]]
    result.write_text(json.dumps(times))


def _engine(spec: Mapping[str, Any]) -> Any:
    from vllm import LLM

    longest = max(point["tokens"] for point in spec["points"]) + NEW + 1
    return LLM(
        model=spec["folder"],
        dtype="bfloat16",
        max_model_len=longest,
        max_num_batched_tokens=longest,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        max_num_seqs=max(point["batch"] for point in spec["points"]),
        limit_mm_per_prompt={"image": 0, "video": 0},
    )


def _point_ms(engine: Any, point: Mapping[str, Any], spec: Mapping[str, Any]) -> float:
    ids, repeat = random.Random(0), spec["repeat"]
    prompts = [
        {"prompt_token_ids": [ids.randrange(spec["vocabulary"]) for _ in range(point["tokens"])]}
        for _ in range(point["batch"])
    ]
    first = _median_ms(engine, prompts, 1, repeat)
    if point["what"] == "prefill":
        return first
    return (_median_ms(engine, prompts, 1 + NEW, repeat) - first) / NEW


def _median_ms(engine: Any, prompts: list[dict[str, list[int]]], count: int, repeat: int) -> float:
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    took = []
    for _ in range(repeat + 1):  # the first one warms up
        started = time.perf_counter()
        engine.generate(prompts, wanted, use_tqdm=False)
        took.append((time.perf_counter() - started) * 1e3)
    return statistics.median(took[1:])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
