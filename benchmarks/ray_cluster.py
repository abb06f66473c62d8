"""Convert on a Ray cluster of four nodes on this machine while one of them is killed.

    python -m benchmarks.ray_cluster [--runs 3] [--nodes 4] [--folder FOLDER]

One layer of the 35B-A3B shape with 64 of its experts (0.5 GB, seeded values) is converted to FP8 by
this machine alone, then as a command on a cluster started with ray's own utility. When some rows
are in the journal, all processes of a node are killed that is converting others. What must hold:
exit code 0, the same bytes, receipt included, as those of one machine.

One JSON line goes to benchmarks/results/ray.jsonl: of each run the rows that were in the journal
when the node was killed, and those that were lost with it and done again; whether all outputs were
identical; seconds of the longest run. Speed is not measured: the nodes share the cores of one
machine. Exit code 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.convert import ENVIRONMENT, ROOT, remove
from benchmarks.great_size import about_here
from benchmarks.lines import record
from benchmarks.sparse import A3B, Shape, write_sparse

RESULTS = Path(__file__).parent / "results" / "ray.jsonl"
SHAPE = Shape(
    A3B
    | {"num_hidden_layers": 1, "num_experts": 64, "vocab_size": 2048, "mtp_num_hidden_layers": 0}
)
LOST = re.compile(r"was lost; (\d+) items are converted again")
SMALL_BATCHES = (
    "from qwen35_convert import cli\nfrom qwen35_convert.run import ray_cluster\n"
    "ray_cluster.BATCH_BYTES = 16 << 20; "
)


def make_source(folder: Path) -> None:
    """Write the checkpoint; every weight is a bfloat16 below 1."""
    import numpy as np

    from qwen35_convert.containers.registry import open_checkpoint

    write_sparse(folder, SHAPE)
    random = np.random.default_rng(0)
    for file in open_checkpoint(folder).files.values():
        with file.path.open("r+b") as opened:
            for name, (start, stop) in file.ranges.items():
                size = 4 if file.infos[name].dtype == "F32" else 2
                values = random.standard_normal((stop - start) // size, np.float32) * 0.02
                bits = values.view(np.uint32)
                opened.seek(start)
                opened.write(bits if size == 4 else (bits >> 16).astype(np.uint16))


def convert(source: Path, out: Path, *more: str, address: str = "") -> subprocess.Popen[str]:
    """Start the command."""
    code = f"{SMALL_BATCHES}cli.main()"
    command = (sys.executable, "-c", code, "convert", str(source), "-o", str(out), *more)
    environment = ENVIRONMENT | ({"RAY_ADDRESS": address} if address else {})
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a command; return what it said on stderr."""
    _, log = process.communicate()
    assert process.returncode == 0, log
    return log


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def journalled(out: Path) -> int:
    """Return how many rows are in the journal."""
    journal = out.with_name(f".{out.name}.qwen35-partial") / "journal"
    return max(0, journal.read_text().count("\n") - 1) if journal.exists() else 0


def find_busy(members: list[Any]) -> Any | None:
    """Return a node one of whose processes converts rows now, by the title that ray gives it."""
    raylets = {member.all_processes["raylet"][0].process.pid: member for member in members}
    for title in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if title.read_bytes().startswith(b"ray::Node.convert"):
                parent = title.with_name("stat").read_text().rsplit(")", 1)[1].split()[1]
                return raylets.get(int(parent))
        except OSError:  # it ended meanwhile
            continue
    return None


def run_once(source: Path, out: Path, nodes: int) -> dict[str, Any]:
    """Convert on a cluster, kill a node midway; return what happened."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    members = [cluster.add_node(num_cpus=1) for _ in range(nodes)]
    started = time.monotonic()
    try:
        process = convert(source, out, "--executor", "ray", address=cluster.address)
        done = 0
        busy = None
        while not (busy and done):
            assert process.poll() is None, process.communicate()[1]
            done, busy = journalled(out), find_busy(members)
        cluster.remove_node(busy, allow_graceful=False)
        log = finish(process)
    finally:
        cluster.shutdown()
    retried = sum(int(count) for count in LOST.findall(log))
    return {"done": done, "retried": retried, "seconds": time.monotonic() - started}


def bench(folder: Path, nodes: int, runs: int) -> dict[str, Any]:
    """Return the line of all runs."""
    source, alone = folder / "in", folder / "alone"
    make_source(source)
    finish(convert(source, alone))
    found, identical = [], True
    for index in range(runs):
        out = folder / f"cluster-{index}"
        found.append(run_once(source, out, nodes))
        identical = identical and files_of(out) == files_of(alone)
        remove(out)
    return {
        "what": "ray cluster",
        "nodes": nodes,
        "killed": 1,
        "runs": runs,
        "rows_before": [run["done"] for run in found],
        "rows_retried": [run["retried"] for run in found],
        "identical": identical,
        "seconds": round(max(run["seconds"] for run in found), 1),
    }


def main() -> None:
    """Run, append the line, judge it."""
    import ray

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        line = bench(Path(folder), options.nodes, options.runs)
    here = about_here()
    here["versions"] |= {"ray": ray.__version__}
    record(RESULTS, line | here)
    sys.exit(0 if line["identical"] and all(line["rows_retried"]) else 1)


if __name__ == "__main__":
    main()
