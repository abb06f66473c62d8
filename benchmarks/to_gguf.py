"""Time `qwen35 convert` to GGUF beside llama.cpp's converter and quantiser, and the encoders.

    python -m benchmarks.to_gguf --llama-cpp TREE --llama-lib FOLDER
                              [--mixes bf16 q8_0 q4_k_m q6_k] [--repeat 3] [--folder FOLDER]
    python -m benchmarks.to_gguf --encoders Q8_0 Q4_K ... [--importance] [--rows 4096]

A checkpoint of the shapes of 0.8B (1.7 GB) is generated. Ours is converted with verification once,
which must pass; then, as whole processes with a warm page cache and in turn, the tools convert it.
For a mix that the converter cannot write, llama.cpp takes two steps through a BF16 file: their
seconds are added, and the larger peak is taken. See `outside` for TREE and FOLDER; without one,
that tool is left out.

    core_s         user + system seconds of the processes
    gb_per_core_s  BF16 read per core second, all included
    disk_gb        bytes written, the file between included
    times          core seconds of this tool over ours
    same_...       how many tensors have the type, and the bytes, of llama.cpp's file

`--encoders` times one matrix of each type on one thread instead, with an imatrix or without; the
hours of a 27B are those of its 54 GB on two cores. Medians of `--repeat` runs; one
JSON line each goes to benchmarks/results/gguf.jsonl. The tools talk on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.convert import (
    ENVIRONMENT,
    ROOT,
    convert_command,
    generate,
    measure,
    median,
    remove,
    surroundings,
)
from benchmarks.lines import append
from benchmarks.outside import Encoder, compare, converter, quantiser

if TYPE_CHECKING:
    import torch

Run = dict[str, float]
RESULTS = Path(__file__).parent / "results" / "gguf.jsonl"
NANO = ROOT / "tests" / "data" / "nano-dense"
THREADS = len(os.sched_getaffinity(0))
ONE_STEP = ("f16", "bf16", "q8_0")
# what llama.cpp wants to be told, and our config reader has defaults for
MORE = {
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "dtype": "bfloat16",
}
COLUMNS = 4096
GB_27B = 54


def make_source(folder: Path) -> None:
    """Write the checkpoint, with the tokenizer of the bundled model."""
    generate(folder, "dense")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["mrope_section"] = [11, 11, 10]
    (folder / "config.json").write_text(json.dumps(config | MORE))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, folder)


def theirs(options: argparse.Namespace, source: Path, out: Path, mix: str) -> list[tuple[str, ...]]:
    """Return llama.cpp's commands, none if it is not at hand."""
    if not options.llama_cpp:
        return []
    if mix in ONE_STEP:
        return [converter(options.llama_cpp, source, out, mix)]
    if not options.llama_lib:
        return []
    between = between_of(out)
    return [
        converter(options.llama_cpp, source, between, "bf16"),
        quantiser(options.llama_lib, between, out, mix, THREADS),
    ]


def between_of(out: Path) -> Path:
    """Return where the BF16 file between the two steps is."""
    return out.with_name(f"between-{out.name}")


def steps(commands: Sequence[tuple[str, ...]]) -> Run:
    """Run commands one after the other; seconds are added, the peak is the largest."""
    runs = [measure(*command) for command in commands]
    total = {key: round(sum(run[key] for run in runs), 3) for key in ("wall_s", "core_s")}
    return total | {"rss_mb": max(run["rss_mb"] for run in runs)}


def bench(options: argparse.Namespace, source: Path, mix: str) -> Iterator[dict[str, Any]]:
    """Check ours, time the tools in turn, compare the files."""
    out = {tool: source.with_name(f"{tool}-{mix}.gguf") for tool in ("qwen35", "llama.cpp")}
    commands = {"llama.cpp": theirs(options, source, out["llama.cpp"], mix)}
    if not options.no_ours:
        convert = convert_command(source, out["qwen35"], f"gguf-{mix}")
        subprocess.run(convert, cwd=ROOT, env=ENVIRONMENT, check=True)  # fails unless it verifies
        commands = {"qwen35": [(*convert, "--no-verify")]} | commands
    found: dict[str, list[Run]] = {tool: [] for tool, steps in commands.items() if steps}
    for _ in range(options.repeat):
        for tool in found:
            remove(out[tool], between_of(out[tool]))
            found[tool].append(steps(commands[tool]))
    done = {tool: median(runs) for tool, runs in found.items()}
    equal = _apart(compare, *out.values()) if len(done) == 2 else {}
    for tool, figures in done.items():
        written = [path for path in (out[tool], between_of(out[tool])) if path.exists()]
        yield _line(source, mix, tool, figures, written) | _beside(done, tool) | equal
    remove(*out.values(), *map(between_of, out.values()))


def _apart(call: Callable[..., dict[str, int]], *arguments: Path) -> dict[str, int]:
    """Call in a process of its own: a child's peak memory counts from its parent's at the fork."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def _beside(done: dict[str, Run], tool: str) -> dict[str, float]:
    if tool == "qwen35" or "qwen35" not in done:
        return {}
    return {"times": round(done[tool]["core_s"] / done["qwen35"]["core_s"], 2)}


def _line(
    source: Path, mix: str, tool: str, figures: Run, written: Sequence[Path]
) -> dict[str, Any]:
    gigabytes = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e9
    return {
        "what": "gguf",
        "mix": mix,
        "tool": tool,
        "gb": round(gigabytes, 3),
        **figures,
        "gb_per_core_s": round(gigabytes / figures["core_s"], 3),
        "disk_gb": round(sum(path.stat().st_size for path in written) / 1e9, 3),
    }


def bench_encoder(kind: str, repeat: int, rows: int, *, weighted: bool) -> dict[str, Any]:
    """Time our encoder of a type and ggml's on one thread, and count the rows that are alike."""
    import torch

    from quant.ggml import codec as ggml

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(35)
    w_NK = (torch.randn(rows, COLUMNS, generator=generator) * 0.02).bfloat16()
    importance = torch.rand(COLUMNS, generator=generator) if weighted else None
    encoder = Encoder(kind)
    ggml.encode(kind, w_NK[:16], importance=importance)  # compiles
    ours_s, blocks = clock(lambda: ggml.encode(kind, w_NK, importance=importance), repeat)
    ggml_s, expected = clock(lambda: encoder(w_NK.float(), importance), repeat)
    megabytes = w_NK.numel() * 2 / 1e6
    return {
        "what": "gguf-encode",
        "type": kind,
        "importance": weighted,
        "hours_27b": round(GB_27B * 1e3 / megabytes * ours_s / 2 / 3600, 2),
        "mb_per_s": round(megabytes / ours_s, 1),
        "ggml_mb_per_s": round(megabytes / ggml_s, 1),
        "times": round(ggml_s / ours_s, 2),
        "rows_alike": int((blocks == expected).all(1).sum()),
        "rows": len(w_NK),
    }


def clock(call: Callable[[], torch.Tensor], repeat: int) -> tuple[float, torch.Tensor]:
    """Return the median of core seconds, and the result."""
    seconds: list[float] = []
    result = call()
    for _ in range(repeat):
        started = time.process_time()
        result = call()
        seconds.append(time.process_time() - started)
    return sorted(seconds)[repeat // 2], result


def show(line: dict[str, Any], runs: int) -> None:
    """Print a line and append it to the results, with what it was measured on."""
    print("  ".join(f"{key} {value}" for key, value in line.items() if key != "what"))
    line |= {"runs": runs, "cores": THREADS}
    append(RESULTS, line | surroundings(("torch", "numba", "gguf")))


def main() -> None:
    """Run what is asked for and append the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--llama-cpp", type=Path, help="source tree with convert_hf_to_gguf.py")
    parser.add_argument("--llama-lib", type=Path, help="folder with libllama.so and libggml.so")
    parser.add_argument("--mixes", nargs="+", default=["bf16", "q8_0", "q4_k_m", "q6_k"])
    parser.add_argument("--no-ours", action="store_true", help="time llama.cpp only")
    parser.add_argument("--encoders", nargs="+", metavar="TYPE", help="time these encoders only")
    parser.add_argument("--importance", action="store_true", help="encoders have an imatrix")
    parser.add_argument("--rows", type=int, default=4096, help="of an encoder's matrix")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to generate (default: a temporary one)")
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.generate:
        make_source(options.generate)
        return
    for kind in options.encoders or ():
        line = bench_encoder(kind, options.repeat, options.rows, weighted=options.importance)
        show(line, options.repeat)
    if options.encoders:
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source = Path(folder) / "source"
        measure(sys.executable, "-m", "benchmarks.to_gguf", "--generate", str(source))
        for mix in options.mixes:
            for line in bench(options, source, mix):
                show(line, options.repeat)


if __name__ == "__main__":
    main()
