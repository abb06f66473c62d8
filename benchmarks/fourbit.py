"""KL of four- and eight-bit artifacts on held-out text: ours, and those of the tools in use.

    python -m benchmarks.fourbit [--models FOLDER ...] [--texts FILE ...] [--peers PYTHON]
    python -m benchmarks.fourbit --table

Each scheme and method converts each model; the same linears are quantised by every tool, on the
same calibration tokens. What an artifact means, by its maker's own decoder, replaces the weights of
the source in transformers; both run in float32 on text that no calibration saw. Parts of each text:

    first   evaluated from character 0 on, calibrated from 14,000 on
    second  evaluated from 14,000 on, calibrated from 62,000 on: texts shared with `first` change
            their role, or are new

`--peers` is a python that has the packages of `benchmarks.fourbit_peers` (default: this one); what
is missing or fails is said, and has a line without figures. One JSON line for each artifact goes to
benchmarks/results/fourbit.jsonl; `--table` prints the last ones as Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.convert import ENVIRONMENT, ROOT, commit, measure
from benchmarks.fourbit_table import BITS, print_table
from benchmarks.lines import record

RESULTS = Path(__file__).parent / "results" / "fourbit.jsonl"
BUNDLED = ROOT / "qwen35_convert" / "text" / "default_text.txt"
NANO = ROOT / "tests" / "data" / "nano-dense"
PARTS = {"first": (0, 14000), "second": (14000, 62000)}
EVALUATED, CHARACTERS = 1024, 12000
TEXTS, LENGTH = 64, 512
METHODS = {
    "qwen35": ("nearest", "sweep", "gptq"),
    "llm-compressor": ("nearest", "gptq"),
    "auto-round": ("nearest",),
    "modelopt": ("nearest", "awq"),
}
TAKES = {("modelopt", "nearest"): ("nvfp4a16", "int4", "int8"), ("modelopt", "awq"): ("int4",)}
PACKAGES = {
    "llm-compressor": ("llmcompressor", "compressed-tensors"),
    "auto-round": ("auto-round",),
    "modelopt": ("nvidia-modelopt",),
}
SAY_VERSIONS = """
import json, sys
from importlib import metadata
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


@dataclass(frozen=True)
class Run:
    """A model and a part of the texts: what is evaluated, and what calibrates."""

    source: Path
    part: str
    evaluated: list[int]
    text: Path
    ids: Path
    peers: str


def prepare(source: Path, texts: list[Path], part: str, folder: Path, peers: str) -> Run:
    """Write the calibration text and its tokens. ValueError if the texts are too short."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    start, behind = PARTS[part]
    contents = [text.read_text(encoding="utf-8") for text in texts]
    evaluated: list[int] = []
    for content in contents:
        evaluated += tokenizer.encode(content[start : start + CHARACTERS]).ids[:EVALUATED]
    each = -(-TEXTS * LENGTH // len(texts)) + 1
    encoded = [tokenizer.encode(content[behind:]) for content in contents]
    ends = [encoding.offsets[:each][-1][1] if encoding.ids else 0 for encoding in encoded]
    joined = "".join(c[behind:][:end] for c, end in zip(contents, ends, strict=True))
    ids = tokenizer.encode(joined).ids[: TEXTS * LENGTH]
    if len(ids) < LENGTH:
        raise ValueError(f"part {part} has {len(ids)} tokens to calibrate, it needs {LENGTH}")
    text, tokens = folder / "calibration.txt", folder / "ids.safetensors"
    text.write_text(joined, encoding="utf-8")
    packed = torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH)
    save_file({"ids": packed}, tokens)
    return Run(source, part, evaluated, text, tokens, peers)


def ours(run: Run, scheme: str, method: str, out: Path) -> dict[str, float]:
    """Convert; return its time and memory."""
    command = [sys.executable, "-m", "qwen35_convert.cli", "convert", str(run.source)]
    command += ["-o", str(out), "--recipe", scheme, "--no-verify"]
    if method != "nearest":
        settings = {
            "method": method,
            "calibrate.text": run.text,
            "calibrate.tokens": TEXTS * LENGTH,
        }
        command += [word for k, v in settings.items() for word in ("--set", f"quantize.{k}={v}")]
    return measure(*command)


def theirs(run: Run, peer: str, scheme: str, method: str, out: Path) -> dict[str, float]:
    """Run a peer in its own process; return its time and memory."""
    command = (run.peers, "-m", "benchmarks.fourbit_peers", peer, scheme, method)
    return measure(*command, str(run.source), str(run.ids), str(out))


def decoded(artifact: Path) -> dict[str, Any]:
    """Return the float32 values of the quantised weights in the layers of our artifact."""
    from quant.opening import open_value
    from qwen35_convert.containers.registry import open_checkpoint

    checkpoint = open_checkpoint(artifact)
    atoms = checkpoint.layout.atoms.values()
    return {
        f"model.{atom.name}": open_value(checkpoint, atom).exact(0, atom.shape[0])
        for atom in atoms
        if atom.quantized and atom.name.startswith("layers.")
    }


def lines(run: Run, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one line for each tool, scheme and method."""
    from benchmarks.fourbit_score import Judge

    judge = Judge(run.source, run.evaluated)
    for scheme in options.schemes:
        for tool in options.tools:
            for method in options.methods or METHODS[tool]:
                if scheme in TAKES.get((tool, method), options.schemes):
                    head = _head(run, tool, scheme, method)
                    missing = [name for name, found in head["versions"].items() if found is None]
                    if missing:
                        yield head | {"failed": f"{missing[0]} is not installed"}
                    else:
                        yield head | _figures(judge, run, (tool, scheme, method))


def _figures(judge: Any, run: Run, asked: tuple[str, str, str]) -> dict[str, Any]:
    from safetensors.torch import load_file

    tool, scheme, method = asked
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        try:
            if tool == "qwen35":
                cost = ours(run, scheme, method, out)
                return judge.score(decoded(out)) | cost
            cost = theirs(run, tool, scheme, method, out)
            return judge.score(load_file(out)) | cost
        except AssertionError:  # it has said on stderr why
            return {"failed": f"{tool} failed"}


def _head(run: Run, tool: str, scheme: str, method: str) -> dict[str, Any]:
    names = ("torch", "transformers", *PACKAGES.get(tool, ()))
    python = sys.executable if tool == "qwen35" else run.peers
    answer = subprocess.run([python, "-c", SAY_VERSIONS, *names], capture_output=True, check=True)
    return {
        "what": "fourbit",
        "model": run.source.name,
        "part": run.part,
        "tool": tool,
        "scheme": scheme,
        "method": method,
        "bits": BITS[scheme],
        "versions": json.loads(answer.stdout),
        "commit": commit(),
    }


def main() -> None:
    """Run what is asked for and append the results, or print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--models", type=Path, nargs="+", default=[NANO])
    parser.add_argument("--texts", type=Path, nargs="+", default=[BUNDLED])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=["first"])
    parser.add_argument("--schemes", nargs="+", choices=list(BITS), default=list(BITS))
    parser.add_argument("--tools", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--methods", nargs="+", help="auto-round knows tuned-N: N iterations")
    parser.add_argument("--peers", default=sys.executable, help="a python that has the peers")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    if options.table:
        print_table(options.results)
        return
    for source in options.models:
        for part in options.parts:
            with tempfile.TemporaryDirectory() as folder:
                run = prepare(source, options.texts, part, Path(folder), options.peers)
                for line in lines(run, options):
                    record(options.results, line)


if __name__ == "__main__":
    ENVIRONMENT.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
