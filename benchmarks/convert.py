"""How fast is `qwen35 convert` on a CPU, beside `cp` + fsync and a plain torch loop?

    python benchmarks/convert.py [--gigabytes 3] [--keep FOLDER]

Checkpoints of real shapes are generated: `dense` (0.8B), `moe` (fused experts of 35B-A3B) and
`fused` (one expert tensor [256, 1024, 2048], 1 GiB). Each is converted first with verification,
which must pass; then everything is timed in one run, as whole processes, with a warm page cache.
`core_s` is user + system time; `start_core_s` is that of a process that only plans, and the rate is
given with and without it. One JSON line for each goes to benchmarks/results/convert.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from formats.config import read_config
from formats.names import HUB, place
from formats.qwen35 import Form, family
from qwen35_convert.receipt import version

RESULTS = Path(__file__).parent / "results" / "convert.jsonl"
ROOT = Path(__file__).parent.parent
COMMON = {
    "head_dim": 256, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25},
    "mtp_num_hidden_layers": 1,
}  # fmt: skip
DENSE = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 1024,
    "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
    "linear_num_value_heads": 16, "intermediate_size": 3584, "tie_word_embeddings": True,
}  # fmt: skip
MOE = {
    "model_type": "qwen3_5_moe_text", "vocab_size": 8192, "hidden_size": 2048,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 2,
    "linear_num_value_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
CASES = {
    "dense": (COMMON | DENSE, Form(vision=False, head=False)),
    "moe": (COMMON | MOE | {"mtp_num_hidden_layers": 0}, Form(vision=False, mtp_layers=0)),
    "fused": (
        COMMON | MOE | {"mtp_num_hidden_layers": 0, "num_hidden_layers": 1, "vocab_size": 256},
        Form(vision=False, mtp_layers=0),
    ),
}
PLAIN_LOOP = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file, save_file
source, out = Path(sys.argv[1]), Path(sys.argv[2])
out.mkdir()
torch.set_num_threads(1)
for file in sorted(source.glob("*.safetensors")):
    done = {}
    for name, w in load_file(file).items():
        if w.dim() < 2 or w.shape[-1] % 128 or w.shape[-2] % 128 or "conv1d" in name:
            done[name] = w
            continue
        x = w.float().reshape(-1, w.shape[-2] // 128, 128, w.shape[-1] // 128, 128)
        scale = x.abs().amax((2, 4), keepdim=True) / 448
        done[name] = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).reshape(w.shape)
        done[name + "_scale_inv"] = scale.reshape(*w.shape[:-2], x.shape[1], x.shape[3])
    save_file(done, out / file.name)
"""


def generate(folder: Path, config: dict[str, Any], form: Form) -> int:
    """Write a checkpoint of these sizes with Gaussian weights; return its bytes."""
    folder.mkdir()
    name = "Qwen3_5MoeForCausalLM" if "num_experts" in config else "Qwen3_5ForCausalLM"
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    resolved = read_config(config)
    pool = (torch.randn(1 << 24) * 0.02).to(torch.bfloat16)
    pack: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    total = size = 0
    for slot in family(resolved.sizes, resolved.layer_types, form):
        numel = torch.Size(slot.shape).numel()
        value = pool.repeat(-(-numel // len(pool)))[:numel].reshape(slot.shape)
        pack[place(slot.hub, HUB)] = value.clone()
        total, size = total + numel * 2, size + numel * 2
        if size > 1_500_000_000:
            where |= _save(folder, pack)
            pack, size = {}, 0
    where |= _save(folder, pack)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def _save(folder: Path, pack: dict[str, torch.Tensor]) -> dict[str, str]:
    file = f"part-{len(list(folder.glob('*.safetensors')))}.safetensors"
    save_file(pack, folder / file, metadata={"format": "pt"})
    return dict.fromkeys(pack, file)


def measure(command: Sequence[str], before: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Run a command; return its wall and core seconds and its peak memory."""
    before()
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    assert status == 0, f"{command[0]} failed"
    return {
        "wall_s": round(wall, 3),
        "core_s": round(usage.ru_utime + usage.ru_stime, 3),
        "rss_mb": round(usage.ru_maxrss / 1e3, 1),
    }


def remove(*paths: Path) -> None:
    """Delete outputs of an earlier run and settle the disk."""
    subprocess.run(["rm", "-rf", *map(str, paths)], check=True)
    os.sync()


def bench(case: str, source: Path, nbytes: int, repeat: int) -> list[dict[str, Any]]:
    """Check, then time ours, cp + fsync and the plain loop, in turn."""
    out, copy, plain = (source.with_name(f"{source.name}-{kind}") for kind in ("out", "cp", "plain"))
    cli = [sys.executable, "-m", "qwen35_convert.cli"]
    convert = [*cli, "convert", str(source), "-o", str(out), "--recipe", "fp8-block"]
    subprocess.run(convert, cwd=ROOT, check=True)  # with verification: fails if it does not pass
    start = measure([*convert, "--plan"])
    commands = {
        "qwen35": ([*convert, "--no-verify"], out),
        "cp_fsync": (["sh", "-c", f"cp -r {source} {copy} && sync -f {copy}"], copy),
        "plain_torch": ([sys.executable, "-c", PLAIN_LOOP, str(source), str(plain)], plain),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(repeat):
        for name, (command, written) in commands.items():
            runs[name].append(measure(command, lambda written=written: remove(written)))
    remove(out, copy, plain)
    return [_line(case, name, nbytes, found, start) for name, found in runs.items()]


def _line(
    case: str, name: str, nbytes: int, runs: list[dict[str, float]], start: dict[str, float]
) -> dict[str, Any]:
    best = {key: sorted(run[key] for run in runs)[len(runs) // 2] for key in runs[0]}
    line: dict[str, Any] = {"what": "convert", "case": case, "tool": name, "gb": nbytes / 1e9} | best
    line["gb_per_core_s"] = round(nbytes / 1e9 / best["core_s"], 3)
    if name == "qwen35":
        line["start_core_s"] = start["core_s"]
        net = best["core_s"] - start["core_s"]
        line["gb_per_core_s_net"] = round(nbytes / 1e9 / net, 3)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True,
                            text=True, check=False).stdout.strip()  # fmt: skip
    cores = len(os.sched_getaffinity(0))
    return line | {"runs": len(runs), "cores": cores, "machine": platform.machine(),
                   "versions": {"qwen35": version(), "torch": torch.__version__,
                                "python": platform.python_version()}, "commit": commit}  # fmt: skip


def main() -> None:
    """Run the cases asked for and append the results."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to generate (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for case in options.cases:
            source = Path(folder) / case
            nbytes = generate(source, *CASES[case])
            for line in bench(case, source, nbytes, options.repeat):
                print(json.dumps(line))
                with RESULTS.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            remove(source)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"(this script itself peaked at {peak / 1e3:.0f} MB)", file=sys.stderr)


if __name__ == "__main__":
    main()
