"""Mean KL against size: our fits and mixes, llama.cpp's mixes, and the artifacts of other tools.

    python -m benchmarks.frontier SOURCE --calibration FILE --text FILE [--work FOLDER]
                                  [--tools NAME ...] [--llama-lib FOLDER] [--peers FILE ...]
    python -m benchmarks.frontier --table
    python -m benchmarks.frontier --picture FILE

    fit        types chosen for each target of bits a weight, by one `qwen35 sensitivity`, for GGUF
    fit-folder the same of compressed-tensors' schemes
    recipe     the bundled recipes of one compressed-tensors scheme
    mix        the bundled gguf-* recipes
    gptq       the same by `quantize.method: gptq`, codes fitted to the calibration text
    fit-gptq   fits for GGUF by that method, types chosen as without it
    llama.cpp  llama_model_quantize of the libraries in a folder (see `outside`)
    --peers    lines of `frontier_peers`, whose artifacts are there

Folders keep the embedding in BF16, which is much of a small model: targets of fit-folder are bits
of the weights that have a choice.

Sensitivities, the importance matrix and all peers see the calibration text alone. Every artifact is
opened by qwen35 and run over the other text beside the source, in float32, by one evaluator. Bytes
are those of the language model's tensors, without vision and MTP. An artifact that is made here
is removed once it is measured. One JSON line each goes to benchmarks/results/frontier.jsonl.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.convert import commit, remove
from benchmarks.frontier_made import MIXES, Bench, Made, peers
from benchmarks.lines import record

RESULTS = Path(__file__).parent / "results" / "frontier.jsonl"
TARGETS = (4.5, 3.5, 6.0, 2.75, 5.25, 8.0)
PACKAGES = ("torch", "gguf")
Line = dict[str, Any]


def measured(bench: Bench, made: Made) -> Line:
    """Return the line of an artifact, which is removed if it was made here."""
    from qwen35_convert.containers.registry import open_checkpoint
    from qwen35_convert.verification.figures import Size
    from qwen35_convert.verification.logits import token_rows
    from qwen35_convert.verification.logits_cache import LogitsCache
    from runtime.compare import compare_logits

    if made.make:
        made.make(made.path)
    source, artifact = open_checkpoint(bench.source), open_checkpoint(made.path)
    rows = token_rows(source, str(bench.text))
    with LogitsCache.of(bench.work / "logits", source, rows, "cpu").opened() as kept:
        report = compare_logits(source, artifact, rows, device="cpu", kept=kept)
    nbytes = made.nbytes or Size.of(artifact).model
    weights = Size.of(source).weights
    if made.make:
        remove(made.path, Path(f"{made.path}.receipt.json"))
    return {
        "what": "frontier", "model": bench.source.name, "tool": made.tool, "name": made.name,
        "bytes": nbytes, "bits": round(8 * nbytes / weights, 3),
        "kl": float(f"{report.kl_mean:.4g}"), "kl_se": float(f"{report.kl_stderr or 0:.2g}"),
        "kl_p999": float(f"{report.kl_p999:.4g}"), "top1": round(report.top1, 4),
        "tokens": report.tokens,
        "versions": {name: metadata.version(name) for name in PACKAGES} | (made.versions or {}),
        "commit": commit(),
    }  # fmt: skip


def every(bench: Bench, options: argparse.Namespace) -> Iterator[Made]:
    """Yield what is asked for."""
    ours = {
        "fit": partial(bench.fits, "fit", "gguf-q8_0", options.targets),
        "fit-folder": partial(bench.fits, "fit-folder", "fp8-block", options.targets),
        "recipe": bench.uniform,
        "mix": bench.mixes,
        "gptq": bench.mixes_by_gptq,
        "fit-gptq": partial(bench.fits, "fit-gptq", "gguf-q8_0", options.targets),
    }
    for tool in options.tools:
        yield from ours[tool]()
    if options.llama_lib:
        yield from bench.theirs(options.llama_lib)
    for file in options.peers:
        yield from peers(file, options.source.name)


def main() -> None:
    """Measure what is asked for, or show what was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--work", type=Path, help="keeps costs, imatrix and logits for later runs")
    parser.add_argument("--targets", type=float, nargs="+", default=TARGETS, help="of fits")
    parser.add_argument("--forms", nargs="*", default=(), help="of fits; none: the usual ones")
    parser.add_argument("--chunks", type=int, default=2, help="of 512 tokens, for sensitivities")
    parser.add_argument("--tools", nargs="*", default=["fit", "mix"], help="as above")
    parser.add_argument("--mixes", nargs="+", default=MIXES)
    parser.add_argument("--llama-lib", type=Path, help="folder with libllama.so and libggml.so")
    parser.add_argument("--peers", type=Path, nargs="*", default=[])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.table or options.picture:
        show(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        work = options.work or Path(folder)
        question = str(options.calibration), options.chunks, tuple(options.forms)
        bench = Bench(options.source, options.text, work, question, options.mixes)
        for made in every(bench, options):
            line = measured(bench, made)
            record(options.results, line)


def show(options: argparse.Namespace) -> None:
    """Print the table, or write the picture, of the last line of each artifact."""
    from benchmarks.frontier_picture import picture_of
    from benchmarks.frontier_table import table

    lines = map(json.loads, options.results.read_text().splitlines())
    own = [one for one in lines if one["what"] == "frontier"]  # and not of a second text
    last = list({(one["model"], one["tool"], one["name"]): one for one in own}.values())
    if options.picture:
        options.picture.write_text(picture_of(last), encoding="utf-8")
    else:
        print(table(last))


if __name__ == "__main__":
    main()
