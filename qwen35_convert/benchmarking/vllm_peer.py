"""vLLM's own process for `bench --peer vllm`: run as a module with the arguments JOB and RESULT.

JOB is JSON: folder, options, vocabulary, cache_bytes, repeat, lock, points. RESULT becomes a list
of milliseconds. Lines of stdout that begin with SAID tell what is being done.

A prompt is timed to its first token. Decode steps are timed while all sequences of the batch
decode, in stretches of STEPS steps: what each of so many more tokens adds. The steps up to the one
that gives each sequence its FIRST tokens are not timed.

So that it ends: steps that only decode are CUDA graphs of the sizes that are asked for, and the
rest runs without torch.compile, which takes a minute; the engine runs in this process, as to start
another one takes half a minute; the choices of kernels that are tuned, about a hundred, are
compiled together. Prompts are read once for all steps.

Trap: the prompts of a batch are read one after another, and those that are read go on meanwhile.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qwen35_convert.benchmarking.peers import SAID
from runtime.kernels.ahead import tuned_together
from runtime.timing import alone

FIRST, STEPS = 8, 32
DEFAULTS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TRITON_CACHE_AUTOTUNING": "1",  # what was tuned is kept as what was compiled is
}
# vLLM demands so much of all memory to be free at the start: its cache has a size of its own
FREE_MEMORY = 0.02


def main(job: Path, result: Path) -> None:
    """Time every point of a job."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    spec, times = json.loads(job.read_bytes()), []
    spec["lock"] = spec["lock"] and Path(spec["lock"])
    with tuned_together():
        _say("starting")
        with alone(spec["lock"], shared=True):
            engine = _engine(spec)
        for point in spec["points"]:
            _say(f"{point['what']}, batch {point['batch']}, {point['tokens']} tokens")
            times.append(_point_ms(engine, point, spec))
    result.write_text(json.dumps(times))
    _say("done")


def _say(text: str) -> None:
    sys.stdout.write(f"\n{SAID}{text}\n")
    sys.stdout.flush()


def _engine(spec: Mapping[str, Any]) -> Any:
    from vllm import LLM

    sizes = sorted({point["batch"] for point in spec["points"]})
    longest = max(point["tokens"] + _most(point, spec) for point in spec["points"])
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return LLM(
        model=spec["folder"],
        dtype="bfloat16",
        max_model_len=longest,
        max_num_batched_tokens=longest,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        max_num_seqs=sizes[-1],
        compilation_config=graphs,
        kv_cache_memory_bytes=spec["cache_bytes"],
        gpu_memory_utilization=FREE_MEMORY,
        limit_mm_per_prompt={"image": 0, "video": 0},
        additional_config={} if find_spec("flashinfer") else {"gdn_prefill_backend": "triton"},
        **spec["options"],
    )


def _most(point: Mapping[str, Any], spec: Mapping[str, Any]) -> int:
    """Return how many tokens a sequence may need: those before it lose as many as it waits for."""
    return int(point["batch"] + FIRST + spec["repeat"] * (STEPS + 1) + 1)


def _point_ms(engine: Any, point: Mapping[str, Any], spec: Mapping[str, Any]) -> float:
    ids, lock = random.Random(0), spec["lock"]
    prompts = [
        [ids.randrange(spec["vocabulary"]) for _ in range(point["tokens"])]
        for _ in range(point["batch"])
    ]
    if point["what"] == "decode":
        steps = _decoding(engine, prompts, _most(point, spec))
        with alone(lock, shared=True):
            next(made for made in steps if made >= FIRST)
        with alone(lock):
            return statistics.median(_step_ms(steps) for _ in range(spec["repeat"]))
    with alone(lock, shared=True):
        _prompt_ms(engine, prompts)  # the first one warms up
    with alone(lock):
        return statistics.median(_prompt_ms(engine, prompts) for _ in range(spec["repeat"]))


def _step_ms(steps: Iterator[int]) -> float:
    """Return the milliseconds of a step in the next stretch."""
    at = next(steps)
    started = time.perf_counter()
    made = next(made for made in steps if made >= at + STEPS)
    return (time.perf_counter() - started) * 1e3 / (made - at)


def _prompt_ms(engine: Any, prompts: list[list[int]]) -> float:
    steps = _decoding(engine, prompts, 1)
    started = time.perf_counter()
    next(steps)
    return (time.perf_counter() - started) * 1e3


def _decoding(engine: Any, prompts: list[list[int]], most: int) -> Iterator[int]:
    """Yield after each step how many tokens every sequence has by then, once all have one."""
    from vllm import SamplingParams

    core, made = engine.llm_engine, {}
    wanted = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        core.add_request(str(i), {"prompt_token_ids": prompt}, wanted)
        made[str(i)] = 0
    try:
        while core.has_unfinished_requests():
            for output in core.step():
                made[output.request_id] = len(output.outputs[0].token_ids)
            if all(made.values()):
                yield min(made.values())
    finally:
        core.abort_request(list(made))
        while core.has_unfinished_requests():
            core.step()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
