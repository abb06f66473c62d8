"""Time an artifact in our runtime and in another engine, in one call on one card.

    python -m benchmarks.beside ARTIFACT [...] [--peer vllm] [--batch 1 8 64] [--prefill 512 8192]

It is `qwen35 bench --peer`, whose points are appended to benchmarks/results/hopper.jsonl, as those
of `benchmarks.hopper`; `peer` names the engine's version. `benchmarks.random_checkpoint` makes
artifacts of the released sizes. An engine that fails is told, and the others are run; the exit code
is 1 then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.convert import commit
from benchmarks.lines import record, rounded
from qwen35_convert import measuring
from qwen35_convert.benchmarking.sweep import Sweep
from qwen35_convert.errors import MissingError

RESULTS = Path(__file__).parent / "results" / "hopper.jsonl"
FIGURES = ("what", "ms", "eager_ms", "floor_ms", "fraction_of_floor", "batch", "peer_ms")


def measure(artifact: Path, sweep: Sweep) -> Iterator[dict[str, Any]]:
    """Yield a line for each point."""
    bench = measuring.bench(artifact, sweep)
    for point in bench.points:
        length = {"context" if point.what == "decode" else "tokens": point.tokens}
        told = {name: getattr(point, name) for name in FIGURES} | length
        named = {"model": artifact.name, "peer": sweep.peer, "card": bench.device}
        yield told | named | {"versions": bench.versions}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is asked for and append the lines."""
    options = _options(arguments)
    sizes = {"prefill": tuple(options.prefill), "batch": tuple(options.batch)}
    named = {name: getattr(options, name) for name in ("context", "device", "peer", "lock")}
    sweep = Sweep(**sizes, **named)
    failed = 0
    for artifact in options.artifacts:
        try:
            lines = list(measure(artifact, sweep))
        except MissingError as error:
            print(f"{artifact}: {error}", file=sys.stderr, flush=True)
            failed += 1
            continue
        for line in lines:
            told = {"commit": options.commit or commit()}
            record(options.results, rounded(line, 4) | told)
    return int(failed > 0)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("artifacts", nargs="+", type=Path, metavar="ARTIFACT", help="folders")
    parser.add_argument("--peer", default="vllm", help="transformers, fla or vllm")
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 64], help="decode steps")
    parser.add_argument("--prefill", nargs="*", type=int, default=[512, 8192], help="prompts")
    parser.add_argument("--context", type=int, default=4096, help="of a decode step")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where lines are appended")
    parser.add_argument("--commit", help="of the tree that this runs from, if it has no .git")
    parser.add_argument("--lock", type=Path, help="a file to lock: load at once, time in turn")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
