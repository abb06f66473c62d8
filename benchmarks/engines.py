"""Load our artifacts in a real vLLM, and compare its predictions with those of our own runtime.

    python -m benchmarks.engines SOURCE [...] --text FILE [--recipes RECIPE ...] [--folder FOLDER]

Every source is converted with every recipe (in the namespace that vLLM knows), unless FOLDER has
the artifact already. Each artifact is loaded by vLLM in a process of its own, several at once. One
JSON line for each artifact is appended to benchmarks/results/engines.jsonl:

    loads                    false: `error` is the last line that names one
    ppl, ppl_ours, ratio     4 rows of 512 tokens of the text; ours in float32 with the weights as
                             stored and inputs as they are: what `verify --level logits` measures
    ppl_source               of the source, in our runtime
    passed                   the two differ by 0.5 % at most
    greedy_equal, prompts    prompts after which both generate the same 32 tokens
    greedy_common            tokens that are the same from the start on, by prompt; ours in bfloat16
    kernels                  what vLLM says it has chosen
    kv_cache                 fp8, where the artifact asks for it: vLLM is told so, ours rounds alike
    scales_loaded            vLLM's attentions have the artifact's scales of keys and values; false:
                             it runs them at others, of which `scales` are the first
    load_s                   until vLLM can answer, its kernels compiled; others load beside it

The exit code is 1 if an artifact does not load, or does not pass. Logs stay in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.convert import commit
from benchmarks.engines_ours import NEW_TOKENS, ask_ours, cache_of, token_rows
from benchmarks.lines import record, rounded

RESULTS = Path(__file__).parent / "results" / "engines.jsonl"
ROOT = Path(__file__).parent.parent
RECIPES = (
    "fp8-block-hub",
    "fp8-channel",
    "int8",
    "nvfp4a16",
    "mxfp4a16",
    "int4",
    "int4-g32",
    "nvfp4-mixed",
    "int4-mixed",
    "fp8-block-kv8",
)
TOLERANCE = 0.005
LONGEST_S = 420
CHOICES = re.compile(r"\] ((?:Using|Selected) .*(?:Kernel|Experts|MoE|GEMM|Method|backend).*)")
ERROR = re.compile(r"\b\w*(?:Error|Exception)\b: .*")


@dataclass(frozen=True)
class Job:
    """One artifact, and where the files of its run are."""

    source: Path
    recipe: str
    folder: Path

    @property
    def artifact(self) -> Path:
        """Return the artifact's folder."""
        return self.folder / f"{self.source.name}-{self.recipe}"

    def file(self, what: str) -> Path:
        """Return the path of a file beside the artifact."""
        return self.folder / f"{self.artifact.name}.{what}"


def convert(job: Job) -> Path:
    """Write and verify the artifact, unless it is there; return its folder."""
    if not job.artifact.exists():
        command = ["-m", "qwen35_convert.cli", "convert", str(job.source), "-o", str(job.artifact)]
        choice = ["--recipe", job.recipe, "--set", "layout=hub", "--set", "vision=keep"]
        _run([*command, *choice], job.file("convert.log"))
    return job.artifact


def ask_vllm(job: Job, spec: dict[str, Any]) -> dict[str, Any]:
    """Return what vLLM measures of the artifact, or why it does not."""
    request, answer, log = (job.file(what) for what in ("job.json", "result.json", "log"))
    answer.unlink(missing_ok=True)
    try:
        folder = convert(job)
        request.write_text(json.dumps(spec | {"folder": str(folder), "cache": cache_of(folder)}))
        _run(["-m", "benchmarks.engines_vllm", str(request), str(answer)], log)
    except subprocess.SubprocessError:
        text = (job.file("convert.log") if not log.exists() else log).read_text(errors="replace")
        return {"loads": False, "error": last_error(text), "kernels": kernels(text)}
    found: dict[str, Any] = json.loads(answer.read_bytes())
    return found | {"loads": True, "kernels": kernels(log.read_text(errors="replace"))}


def _run(arguments: Sequence[str], log: Path) -> None:
    command, environment = [sys.executable, *arguments], os.environ | {"PYTHONUNBUFFERED": "1"}
    with log.open("w") as file:
        subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=file,
            check=True,
            timeout=LONGEST_S,
        )


def kernels(log: str) -> list[str]:
    """Return vLLM's own words for what it has chosen, each once; not where it looked for files."""
    return list(dict.fromkeys(line.partition(" Config file")[0] for line in CHOICES.findall(log)))


def last_error(log: str) -> str:
    """Return the last thing in a log that is called an error, else its last line."""
    lines = log.split("\n")
    named = [found.group(0) for line in lines if (found := ERROR.search(line))]
    return (named or [line for line in lines if line.strip()] or ["nothing was said"])[-1][:500]


def line_of(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of an artifact; `passed` is false if it does not load."""
    apart = ("tokens", "tokens_ours", "scales", "scales_ours")
    line = {key: value for key, value in (ours | theirs).items() if key not in apart}
    if not theirs["loads"]:
        return line | {"passed": False}
    line |= scales_of(theirs.get("scales", {}), ours.get("scales_ours", {}))
    ratio = theirs["ppl"] / ours["ppl_ours"]
    counts = [common(*pair) for pair in zip(theirs["tokens"], ours["tokens_ours"], strict=True)]
    return line | {
        "ratio": ratio,
        "passed": abs(ratio - 1) <= TOLERANCE,
        "greedy_equal": sum(count == NEW_TOKENS for count in counts),
        "prompts": len(counts),
        "greedy_common": counts,
    }


def scales_of(theirs: dict[str, list[float]], ours: dict[str, list[float]]) -> dict[str, Any]:
    """Return whether vLLM has the scales of keys and values by attention; {} if there are none."""
    if not ours:
        return {}
    loaded = theirs.keys() == ours.keys() and all(
        math.isclose(a, b, rel_tol=1e-6)
        for attention, pair in ours.items()
        for a, b in zip(pair, theirs[attention], strict=True)
    )
    others = {} if loaded else {"scales": dict(list(theirs.items())[:1])}
    return {"kv_cache": "fp8", "scales_loaded": loaded} | others


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many tokens are the same from the start on."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a line for each artifact, as soon as vLLM is done with it."""
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sources = [source.resolve() for source in options.sources]
    chosen = {"attention": options.attention}
    specs = {source: token_rows(source, options.text) | chosen for source in sources}
    jobs = [Job(source, recipe, folder) for recipe in options.recipes for source in sources]
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs_of = {pool.submit(ask_vllm, job, specs[job.source]): job for job in jobs}
        for done in as_completed(jobs_of):
            job, theirs = jobs_of[done], done.result()
            ours: dict[str, Any] = {}
            if job.artifact.exists():
                ours = ask_ours(job.source, job.artifact, specs[job.source], options.device)
            named = {"what": "engine", "model": job.source.name, "recipe": job.recipe}
            yield named | line_of(theirs, ours)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for and append the lines."""
    options = _options(arguments)
    return record_each(measure(options), options, "passed")


def record_each(lines: Iterator[dict[str, Any]], options: argparse.Namespace, good: str) -> int:
    """Record lines as they come, with card and commit; return 1 if one is not `good`, else 0."""
    import torch

    card = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    told = {"card": card, "commit": options.commit or commit()}
    failed = 0
    for found in lines:
        record(options.results, rounded(found | told, 6))
        failed += not found[good]
    return int(failed > 0)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "sources", nargs="+", type=Path, metavar="SOURCE", help="folders of source models"
    )
    parser.add_argument("--text", type=Path, required=True, help="a text none of them was made of")
    parser.add_argument("--recipes", nargs="+", default=RECIPES, metavar="RECIPE")
    parser.add_argument("--folder", type=Path, default=Path("out"), help="of artifacts and logs")
    parser.add_argument("--jobs", type=int, default=8, help="engines at once")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="of our runtime")
    parser.add_argument(
        "--attention", help="vLLM's attention backend, where its choice will not do"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are appended")
    parser.add_argument("--commit", help="of the tree that this runs from, if it has no .git")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
