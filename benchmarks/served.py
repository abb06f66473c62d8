"""Run the lines that `qwen35 inspect` prints for vLLM, and ask the servers over HTTP.

    python -m benchmarks.served SOURCE [...] --text FILE [--recipes RECIPE ...] [--folder FOLDER]

Every source is converted with every recipe, unless FOLDER has the artifact. Each line that is shown
of it, the one that drafts tokens too, is run by a shell as it is printed, several at once; what is
added is for a machine that they share and that has no FlashInfer: a port, a part of the memory, the
backend of the delta rule. One JSON line for each is appended to benchmarks/results/engines.jsonl:

    line, added              what was run
    starts                   false: `error` is the last line of the log that names one
    start_s                  until it answers /health; others start beside it
    greedy_equal, prompts    prompts after which both generate the same 32 tokens
    greedy_common            tokens that are the same from the start on, by prompt; ours in bfloat16
    text                     what the server says after the first prompt
    drafted, accepted        tokens of the MTP head, by the server's own counters
    kernels                  what vLLM says it has chosen

The exit code is 1 if a line starts no server. Logs stay in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.engines import RESULTS, ROOT, Job, common, convert, kernels, last_error, record_each
from benchmarks.engines_ours import NEW_TOKENS, continued, token_rows
from benchmarks.engines_vllm import ENVIRONMENT

RECIPES = ("fp8-block-hub", "fp8-block-kv8", "int8", "int4", "nvfp4a16", "nvfp4-mixed")
CONTEXT, BATCH = 2048, 8
LONGEST_S = 360
ALONE = "VLLM_ENABLE_V1_MULTIPROCESSING"  # of an engine in one process; a server has two
ADDED = (
    "--gpu-memory-utilization 0.02 --kv-cache-memory-bytes 2000000000 --gdn-prefill-backend triton"
)
COUNTERS = {"drafted": "draft_tokens", "accepted": "accepted_tokens"}


@dataclass(frozen=True)
class Line:
    """A line that is shown of an artifact; what is `plain` or `draft` of it."""

    job: Job
    what: str
    text: str
    added: str

    @property
    def log(self) -> Path:
        """Return where the server's own words are."""
        return self.job.file(f"{self.what}.log")


def lines_of(job: Job, added: str) -> Iterator[Line]:
    """Yield the lines that `inspect --context --batch` shows for vLLM."""
    from qwen35_convert.inspection.source import inspect

    shown = inspect(convert(job), context=CONTEXT, batch=BATCH).serving["engines"]
    (engine,) = (one for one in shown if one["engine"] == "vllm")
    for what in ("serve", "draft"):
        yield from (Line(job, what, text, added) for text in engine[what])


def ask(line: Line, port: int, spec: dict[str, Any]) -> dict[str, Any]:
    """Run a line, and return what its server answers, or why there is none."""
    started, address = time.perf_counter(), f"http://127.0.0.1:{port}"
    with line.log.open("w") as log:
        server = subprocess.Popen(
            ["bash", "-c", f"{line.text} {line.added} --port {port}"],
            cwd=ROOT,
            env={k: v for k, v in (os.environ | ENVIRONMENT).items() if k != ALONE},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            _wait(server, f"{address}/health")
            start = {"starts": True, "start_s": round(time.perf_counter() - started, 1)}
            chosen = {"kernels": kernels(line.log.read_text(errors="replace"))}
            return start | _answers(address, str(line.job.artifact), spec) | chosen
        except (OSError, RuntimeError) as error:
            text = line.log.read_text(errors="replace")
            return {"starts": False, "error": last_error(f"{text}\n{error}")}
        finally:
            stop(server)


def _wait(server: subprocess.Popen[bytes], address: str) -> None:
    """Return as soon as the server answers. RuntimeError if it ends, or takes too long."""
    for _ in range(LONGEST_S):
        if server.poll() is not None:
            raise RuntimeError(f"it ended with exit code {server.returncode}")
        try:
            with urlopen(address, timeout=10):
                return
        except OSError:
            time.sleep(1)
    raise RuntimeError(f"it does not answer after {LONGEST_S} s")


def _answers(address: str, model: str, spec: dict[str, Any]) -> dict[str, Any]:
    body = {"model": model, "temperature": 0, "max_tokens": spec["new_tokens"]}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answers = [
        _post(f"{address}/v1/completions", body | {"prompt": ids}) for ids in spec["prompts"]
    ]
    choices = [one["choices"][0] for one in answers]
    with urlopen(f"{address}/metrics", timeout=60) as answer:
        counted = drafts(answer.read().decode())
    return {"tokens": [one["token_ids"] for one in choices], "text": choices[0]["text"]} | counted


def _post(address: str, body: dict[str, Any]) -> Any:
    request = Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=300) as answer:
        return json.load(answer)


def drafts(metrics: str) -> dict[str, int]:
    """Return how many tokens were drafted and accepted, by vLLM's counters; {} without drafts."""
    found = {}
    for what, name in COUNTERS.items():
        pattern = rf"^vllm:spec_decode_num_{name}_total(?:{{.*}})? (\S+)$"
        if match := re.search(pattern, metrics, re.MULTILINE):
            found[what] = int(float(match.group(1)))
    return found


def stop(server: subprocess.Popen[bytes]) -> None:
    """End a server and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with suppress(subprocess.TimeoutExpired):
            server.wait(20)


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each that was run, as soon as it is answered."""
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sources = [source.resolve() for source in options.sources]
    specs = {source: token_rows(source, options.text) for source in sources}
    jobs = [Job(source, recipe, folder) for source in sources for recipe in options.recipes]
    with ThreadPoolExecutor(options.jobs) as pool:
        shown = pool.map(lambda job: list(lines_of(job, options.added)), jobs)
        lines = [line for some in shown for line in some if line.what in options.what]
        running = {
            pool.submit(ask, line, options.port + i, specs[line.job.source]): line
            for i, line in enumerate(lines)
        }
        for done in as_completed(running):
            line = running[done]
            ours = _ours(line.job, specs[line.job.source], options.device)
            yield _told(line, done.result(), ours)


def _ours(job: Job, spec: dict[str, Any], device: str) -> list[list[int]]:
    from qwen35_convert.source import open_source

    return list(continued(open_source(job.artifact)[0], spec, device))


def _told(line: Line, found: dict[str, Any], ours: list[list[int]]) -> dict[str, Any]:
    told = {"what": "served", "model": line.job.source.name, "recipe": line.job.recipe}
    told |= {"line": shown_line(line), "added": line.added}
    if not found["starts"]:
        return told | found
    counts = [common(*pair) for pair in zip(found.pop("tokens"), ours, strict=True)]
    equal = sum(count == NEW_TOKENS for count in counts)
    return told | found | {"greedy_equal": equal, "prompts": len(ours), "greedy_common": counts}


def shown_line(line: Line) -> str:
    """Return a line with the artifact's name in place of its path here."""
    return line.text.replace(shlex.quote(str(line.job.artifact)), line.job.artifact.name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for and append the lines."""
    options = _options(arguments)
    return record_each(measure(options), options, "starts")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "sources", nargs="+", type=Path, metavar="SOURCE", help="folders of source models"
    )
    parser.add_argument("--text", type=Path, required=True, help="a text none of them was made of")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="RECIPE")
    parser.add_argument("--what", nargs="+", default=["serve", "draft"], help="lines to run")
    parser.add_argument("--added", default=ADDED, help="options that this machine needs")
    parser.add_argument("--port", type=int, default=8000, help="of the first server")
    parser.add_argument("--folder", type=Path, default=Path("out"), help="of artifacts and logs")
    parser.add_argument("--jobs", type=int, default=8, help="servers at once")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="of our runtime")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are appended")
    parser.add_argument("--commit", help="of the tree that this runs from, if it has no .git")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
