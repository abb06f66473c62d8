"""Time `qwen35 convert` on a CPU, beside `cp` + fsync and a plain torch loop.

    python -m benchmarks.convert [--cases dense moe fused] [--repeat 3] [--folder FOLDER]

Checkpoints of real shapes are generated: `dense` (0.8B), `moe` (fused experts of 35B-A3B, two
layers) and `fused` (one layer: the single tensor [256, 1024, 2048] has 1 GiB). Each is converted
first with verification, which must pass. Then, in turn and as whole processes with a warm page
cache: our conversion, `cp` + fsync, and a loop of eager torch.

    core_s              user + system seconds of the process
    start_core_s        of a process that imports everything and converts nothing
    hash_core_s         of the two SHA-256 passes that the receipt asks for, over input and output
    gb_per_core_s       BF16 read per core second, all included
    gb_per_core_s_net   without start and hashes: reading, quantising, writing

Medians of `--repeat` runs; one JSON line for each tool goes to benchmarks/results/convert.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.lines import record

if TYPE_CHECKING:
    import torch

# Nothing heavy is imported here: a child's peak memory starts at that of its parent.
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
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dense": (COMMON | DENSE, {"vision": False, "head": False}),
    "moe": (COMMON | MOE | {"mtp_num_hidden_layers": 0}, {"vision": False, "mtp_layers": 0}),
    "fused": (
        COMMON | MOE | {"mtp_num_hidden_layers": 0, "num_hidden_layers": 1, "vocab_size": 256},
        {"vision": False, "mtp_layers": 0},
    ),
}
START = "import quant.fp8.cpu, qwen35_convert.api"
HASH = """
import sys
from pathlib import Path
from qwen35_convert.write.digests import sha256_file
for folder in sys.argv[1:]:
    for path in Path(folder).iterdir():
        sha256_file(path)
"""
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


def generate(folder: Path, case: str) -> None:
    """Write a checkpoint of these sizes with Gaussian weights."""
    import torch

    from formats.family.config import read_config
    from formats.family.names import HUB, place
    from formats.family.slots import Form, family

    config, form = CASES[case]
    folder.mkdir()
    name = "Qwen3_5MoeForCausalLM" if "num_experts" in config else "Qwen3_5ForCausalLM"
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [name]}))
    resolved = read_config(config)
    pool = (torch.randn(1 << 24) * 0.02).to(torch.bfloat16)
    pack: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}
    size = 0
    for slot in family(resolved.sizes, resolved.layer_types, Form(**form)):
        numel = torch.Size(slot.shape).numel()
        value = pool.repeat(-(-numel // len(pool)))[:numel].reshape(slot.shape)
        pack[place(slot.hub, HUB)] = value.clone()
        size += numel * 2
        if size > 1_500_000_000:
            where |= _save(folder, pack)
            pack, size = {}, 0
    where |= _save(folder, pack)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _save(folder: Path, pack: dict[str, torch.Tensor]) -> dict[str, str]:
    from safetensors.torch import save_file

    file = f"part-{len(list(folder.glob('*.safetensors')))}.safetensors"
    save_file(pack, folder / file, metadata={"format": "pt"})
    return dict.fromkeys(pack, file)


def measure(*command: str) -> dict[str, float]:
    """Run a command; return its wall and core seconds and its peak memory."""
    started = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    assert status == 0, f"{command[0]} failed"
    return {
        "wall_s": round(wall, 3),
        "core_s": round(usage.ru_utime + usage.ru_stime, 3),
        "rss_mb": round(usage.ru_maxrss / 1e3, 1),
    }


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def median(runs: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {key: sorted(run[key] for run in runs)[len(runs) // 2] for key in runs[0]}


def convert_command(source: Path, out: Path, recipe: str) -> tuple[str, ...]:
    """Return the command that converts."""
    cli = (sys.executable, "-m", "qwen35_convert.cli", "convert")
    return (*cli, str(source), "-o", str(out), "--recipe", recipe)


def generate_apart(folder: Path, case: str) -> None:
    """Make a case in a process of its own, whose memory is not counted here."""
    measure(sys.executable, "-m", "benchmarks.convert", "--generate", str(folder), "--cases", case)


def bench(case: str, source: Path, repeat: int) -> list[dict[str, Any]]:
    """Check, then time ours, cp + fsync and the plain loop, in turn."""
    out, copy, plain = (source.with_name(f"{source.name}-{k}") for k in ("out", "cp", "plain"))
    convert = convert_command(source, out, "fp8-block")
    subprocess.run(convert, cwd=ROOT, env=ENVIRONMENT, check=True)  # fails unless it verifies
    start = median([measure(sys.executable, "-c", START) for _ in range(repeat)])
    hashes = median(
        [measure(sys.executable, "-c", HASH, str(source), str(out)) for _ in range(repeat)]
    )
    commands = {
        "qwen35": ((*convert, "--no-verify"), out),
        "cp_fsync": (("sh", "-c", f"cp -r {source} {copy} && sync -f {copy}"), copy),
        "plain_torch": ((sys.executable, "-c", PLAIN_LOOP, str(source), str(plain)), plain),
    }
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(repeat):
        for name, (command, written) in commands.items():
            remove(written)
            runs[name].append(measure(*command))
    remove(out, copy, plain)
    parts = {"start_core_s": start["core_s"], "hash_core_s": hashes["core_s"]}
    gigabytes = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e9
    return [_line(case, name, gigabytes, found, parts) for name, found in runs.items()]


def remove(*paths: Path) -> None:
    """Delete outputs of an earlier run and settle the disk."""
    subprocess.run(["rm", "-rf", *map(str, paths)], check=True)
    os.sync()


def _line(
    case: str, name: str, gigabytes: float, runs: list[dict[str, float]], parts: dict[str, float]
) -> dict[str, Any]:
    line: dict[str, Any] = {
        "what": "convert",
        "case": case,
        "tool": name,
        "gb": round(gigabytes, 3),
    }
    line |= median(runs)
    line["gb_per_core_s"] = round(gigabytes / line["core_s"], 3)
    if name == "qwen35":
        line |= parts
        net = line["core_s"] - parts["start_core_s"] - parts["hash_core_s"]
        line["gb_per_core_s_net"] = round(gigabytes / net, 3)
    line |= {"runs": len(runs), "cores": len(os.sched_getaffinity(0))}
    return line | surroundings(("torch", "numba", "safetensors"))


def surroundings(packages: Sequence[str]) -> dict[str, Any]:
    """Return what a line says of the machine, the packages and the code."""
    return {
        "machine": platform.machine(),
        "load": round(os.getloadavg()[0], 1),
        "versions": {name: metadata.version(name) for name in packages},
        "commit": commit(),
    }


def commit() -> str:
    """Return the commit this ran on, with + if the tree was changed."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip()


def main() -> None:
    """Run the cases asked for and append the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where to generate (default: a temporary one)")
    parser.add_argument("--generate", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.generate:
        generate(options.generate, options.cases[0])
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for case in options.cases:
            source = Path(folder) / case
            generate_apart(source, case)
            for line in bench(case, source, options.repeat):
                record(RESULTS, line)
            remove(source)


if __name__ == "__main__":
    main()
