"""Other engines on the same weights, for `bench --peer`.

A peer is given the points that were measured and returns them with its own milliseconds: the same
step, a token for each sequence of a batch at a context, or a prompt with the logits of its last.

    transformers  in this process, with the kernels it finds
    fla           the same, and its delta rule must be that of flash-linear-attention
    vllm          in a process of its own (`vllm_peer`), because it takes the GPU for itself
"""

from __future__ import annotations

import json
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE, STDOUT
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from qwen35_convert.containers.registry import container_of
from qwen35_convert.errors import MissingError, RecipeError
from qwen35_convert.options import check_choice
from qwen35_convert.progress import notice
from qwen35_convert.serving.artifact import served
from qwen35_convert.serving.commands import starts
from qwen35_convert.serving.engines import VLLM

if TYPE_CHECKING:
    from formats.family.config import Config
    from qwen35_convert.benchmarking.point import Point
    from qwen35_convert.benchmarking.sweep import Sweep

REPEAT = 3
MORE = 256  # tokens that are generated after a context, at most
LEAST_CACHE = 2 * 10**9
PATIENCE, GRACE = 1200, 30  # seconds that another engine may take in all, and to end
SAID = "said: "  # what lines begin with that tell what it does
PACKAGES = {"fla": "flash-linear-attention"}  # modules whose package has another name


def find_peer(name: str) -> Callable[[Checkpoint, Sequence[Point], Sweep], Iterator[Point]]:
    """Return the peer of that name. MissingError if its package is not installed."""
    check_choice("peer", name, tuple(PEERS))
    for module in ("transformers", "fla") if name == "fla" else (name,):
        if find_spec(module) is None:
            package = PACKAGES.get(module, module)
            raise MissingError(
                f"peer {name}",
                "is not installed",
                f"the package {package}",
                f"pip install {package}",
            )
    return PEERS[name]


def _need_folder(checkpoint: Checkpoint, name: str) -> Path:
    if name not in container_of(checkpoint).loaders:
        raise RecipeError(f"peer {name}", "cannot read a GGUF file", "a folder of safetensors")
    return checkpoint.folder


def run_transformers(
    checkpoint: Checkpoint, points: Sequence[Point], sweep: Sweep
) -> Iterator[Point]:
    """Yield the points with transformers' times; it reads folders of safetensors only.

    MissingError if it lacks a package for these weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    folder = _need_folder(checkpoint, "transformers")
    device = sweep.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model = model.to(device).eval()
        for point in points:
            ms = _transformers_ms(model, point, checkpoint.config.sizes["V"])
            yield replace(point, peer_ms=ms)
    except ImportError as error:  # kernels of FP8 weights are packages of their own
        raise MissingError(f"peer transformers cannot run {folder}: {error}") from None


def _transformers_ms(model: Any, point: Point, vocabulary: int) -> float:
    import torch

    ids = torch.randint(vocabulary, (point.batch, point.tokens), device=model.device)
    with torch.inference_mode():
        if point.what == "prefill":
            return _median_ms(lambda: model(ids, use_cache=False, logits_to_keep=1), model)
        cache = model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        # the cache grows by one token per call, negligible beside its length
        return _median_ms(lambda: model(ids[:, -1:], past_key_values=cache, use_cache=True), model)


def _median_ms(call: Callable[[], object], model: Any) -> float:
    call()
    return statistics.median(_wall_ms(call, model) for _ in range(REPEAT))


def _wall_ms(call: Callable[[], object], model: Any) -> float:
    import torch

    started = time.perf_counter()
    call()
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def run_fla(checkpoint: Checkpoint, points: Sequence[Point], sweep: Sweep) -> Iterator[Point]:
    """Yield the points with the times of transformers over FLA's kernels, which need a GPU.

    transformers uses FLA's delta rule if it can be imported, and falls back silently.
    """
    if sweep.device != "cuda":
        raise RecipeError("peer fla", f"cannot run on {sweep.device}", "cuda")
    try:
        import_module("fla.ops.gated_delta_rule")
    except ImportError as error:
        raise MissingError(f"peer fla cannot be imported: {error}") from None
    yield from run_transformers(checkpoint, points, sweep)


def run_vllm(checkpoint: Checkpoint, points: Sequence[Point], sweep: Sweep) -> Iterator[Point]:
    """Yield the points with vLLM's times, started as `inspect` says. MissingError if it fails."""
    folder = _need_folder(checkpoint, "vllm")
    if sweep.device != "cuda":
        raise RecipeError("peer vllm", f"cannot run on {sweep.device}", "cuda")
    request = {
        "folder": str(folder),
        "options": _vllm_options(checkpoint),
        "vocabulary": checkpoint.config.sizes["V"],
        "cache_bytes": _cache_bytes(checkpoint.config, points),
        "repeat": REPEAT,
        "lock": sweep.lock and str(sweep.lock),
    }
    with TemporaryDirectory() as scratch:
        job, result = Path(scratch) / "job.json", Path(scratch) / "result.json"
        job.write_text(json.dumps(request | {"points": [asdict(point) for point in points]}))
        _told(["-m", "qwen35_convert.benchmarking.vllm_peer", str(job), str(result)], "peer vllm")
        times: list[float] = json.loads(result.read_bytes())
    for point, ms in zip(points, times, strict=True):
        yield replace(point, peer_ms=ms)


def _cache_bytes(config: Config, points: Sequence[Point]) -> int:
    """Return the bytes of an engine's cache: twice those of all tokens, as blocks are whole."""
    from runtime.floors import sequence_bytes

    filled = (point.batch * sequence_bytes(config, point.tokens + MORE) for point in points)
    return int(2 * max(filled, default=0)) + LEAST_CACHE


def _told(words: Sequence[str], subject: str) -> None:
    """Run Python on these words, and pass on the lines that tell what it does, with seconds.

    MissingError if it fails, or takes longer than PATIENCE, with its last lines.
    """
    started, last = time.monotonic(), deque[str](maxlen=40)
    command = [sys.executable, *words]
    with subprocess.Popen(command, stdout=PIPE, stderr=STDOUT, text=True, errors="replace") as run:
        clock = threading.Timer(PATIENCE, _end, [run])
        clock.start()
        try:
            for line in run.stdout or ():
                last.append(line)
                if line.startswith(SAID):
                    seconds = time.monotonic() - started
                    notice(f"{subject}, {seconds:.0f} s: {line.removeprefix(SAID).strip()}")
            run.wait()
        finally:
            clock.cancel()
            _end(run)
    if run.returncode:
        raise MissingError(f"{subject} failed, exit {run.returncode}: {''.join(last)[-3000:]}")


def _end(run: subprocess.Popen[str]) -> None:
    """End a process that still runs; it is given time to end those that it has started."""
    if run.poll() is None:
        run.send_signal(signal.SIGINT)
        try:
            run.wait(GRACE)
        except subprocess.TimeoutExpired:
            run.kill()


def _vllm_options(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the options of the line that serves it. RecipeError if vLLM does not load it."""
    artifact = served(checkpoint, str(checkpoint.folder))
    found = [start for start in starts(artifact) if start.engine == VLLM] if artifact else []
    for start in found:
        if start.cannot:
            raise RecipeError("peer vllm", start.cannot, "an artifact that it loads")
    return keywords(shlex.split(found[0].pasted)[3:]) if found else {}


def keywords(words: Sequence[str]) -> dict[str, object]:
    """Return the options of a command line as keyword arguments; one without a value is True."""
    found: dict[str, object] = {}
    for name, value in pairwise([*words, "--"]):
        if name.startswith("--"):
            found[name[2:].replace("-", "_")] = True if value.startswith("--") else _plain(value)
    return found


def _plain(word: str) -> object:
    try:
        return json.loads(word)
    except ValueError:
        return word


PEERS = {"transformers": run_transformers, "fla": run_fla, "vllm": run_vllm}
