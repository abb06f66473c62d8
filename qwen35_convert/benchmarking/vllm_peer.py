"""vLLM's own process for `bench --peer vllm`: run as a module with the arguments JOB and RESULT.

JOB is JSON: folder, options, vocabulary, repeat, points. RESULT becomes a list of milliseconds. A
prompt is timed to its first token. vLLM does not report single steps, so a decode step is what each
of NEW more tokens adds, which leaves out the prompts and the overhead of a request:

    ms = (T(n + NEW) - T(n)) / NEW      n = 1 + 2 * batch, or 1 of a batch of 1

Trap: the prompts of a batch are read one after another, and those that are read go on meanwhile.
After fewer than n tokens the first would be done before the last begins.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
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

    longest = max(point["tokens"] + _first(point) + NEW for point in spec["points"])
    return LLM(
        model=spec["folder"],
        dtype="bfloat16",
        max_model_len=longest,
        max_num_batched_tokens=longest,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        max_num_seqs=max(point["batch"] for point in spec["points"]),
        limit_mm_per_prompt={"image": 0, "video": 0},
        additional_config={} if find_spec("flashinfer") else {"gdn_prefill_backend": "triton"},
        **spec["options"],
    )


def _point_ms(engine: Any, point: Mapping[str, Any], spec: Mapping[str, Any]) -> float:
    ids, repeat = random.Random(0), spec["repeat"]
    prompts = [
        {"prompt_token_ids": [ids.randrange(spec["vocabulary"]) for _ in range(point["tokens"])]}
        for _ in range(point["batch"])
    ]
    if point["what"] == "prefill":
        return _median([_took_ms(engine, prompts, 1) for _ in range(repeat + 1)])
    few = _first(point)
    pairs = [[_took_ms(engine, prompts, n) for n in (few, few + NEW)] for _ in range(repeat + 1)]
    return _median([(more - fewer) / NEW for fewer, more in pairs])


def _first(point: Mapping[str, Any]) -> int:
    """Return after how many tokens every sequence of the batch decodes."""
    return 1 + (2 * point["batch"] if point["batch"] > 1 else 0)


def _median(took: list[float]) -> float:
    """Return the median; the first one warms up."""
    return statistics.median(took[1:])


def _took_ms(engine: Any, prompts: list[dict[str, list[int]]], count: int) -> float:
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    engine.generate(prompts, wanted, use_tqdm=False)
    return (time.perf_counter() - started) * 1e3


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
