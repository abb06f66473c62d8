"""Faults of the network, each command at each place; and what a streamed conversion costs.

    python -m benchmarks.faults network [--layers 4 16] [--record]

The faults are those of tests/qwen35_convert/test_network_faults.py, against a hub on the loopback:
cut and reset connections, busy servers, wrong bytes and lengths, other revisions, what is gated,
missing or offline. A case is right if the exit code is, nothing is half-written, and the same
command without the fault gives the bytes of an undisturbed run.

Of `convert --stream` of a model of so many layers: the bytes asked for as a multiple of the
model's, the process's peak memory, the most that stood on the disk beside OUT at any time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from benchmarks.faults import fault_line, record
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.qwen35_convert.hub.hub_server import Hub

ROOT = Path(__file__).parent.parent
TESTS = "tests/qwen35_convert/test_network_faults.py"
INJECTED = "fault or moves or another_commit or not_there or ask_for_time"
MB, REPO = 1e6, "maker/model"
COMMAND = """
import sys
from qwen35_convert import cli
try:
    cli.main()
finally:
    print(open("/proc/self/status").read(), file=sys.stderr)
"""  # ru_maxrss would count what forked, too: this process, which holds the hub's files


def try_all() -> tuple[int, list[str]]:
    """Return how many faults were tried, and which of them were answered wrongly."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.xml"
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "--all-faults",
                TESTS,
                "-k",
                INJECTED,
                f"--junitxml={found}",
            ],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert found.is_file(), done.stdout
        cases = list(ET.parse(found).iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    return len(cases), [case.get("name", "") for case in failed]


def publish(hub: Hub, layers: int, folder: Path) -> int:
    """Put a model of so many layers on the hub; return the bytes of its tensors' files."""
    types = [*["linear_attention"] * 3, "full_attention"] * (layers // 4)
    config = hub_config(
        hidden_size=1024,
        intermediate_size=3584,
        vocab_size=50000,
        num_hidden_layers=layers,
        layer_types=types,
        head_dim=256,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    write_checkpoint(folder, config, make_weights(config), shards=2)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.repo(REPO).commit(files)
    return sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))


def size_of(folder: Path) -> int:
    """Return the bytes of all files below a folder, as the disk counts them."""
    found = 0
    for path in folder.rglob("*"):
        try:
            found += path.lstat().st_blocks * 512 if path.is_file() else 0
        except FileNotFoundError:  # renamed meanwhile
            continue
    return found


def stream(hub: Hub, place: Path) -> dict[str, Any]:
    """Convert from the hub in a place of its own; say what that took."""
    homes = dict.fromkeys(("HF_HOME", "TMPDIR", "HOME"), str(place / "home"))
    (place / "home").mkdir(parents=True)
    environment = (
        os.environ
        | homes
        | {
            "HF_ENDPOINT": hub.url,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "NUMBA_CACHE_DIR": str(place.with_name("compiled")),
        }
    )
    command = [sys.executable, "-c", COMMAND, "convert", REPO, "-o", "out", "--stream"]
    hub.seen.clear()
    beside, most = 0, 0
    with (place / "said").open("w+") as said:
        running = subprocess.Popen(command, cwd=place, env=environment, stdout=said, stderr=said)
        while running.poll() is None:
            time.sleep(0.05)
            most, beside = max(most, size_of(place)), max(beside, size_of(place / "home"))
        text = (place / "said").read_text()
    assert running.returncode == 0, text
    asked = [seen.range.removeprefix("bytes=").split("-") for seen in hub.seen if seen.range]
    peak = re.search(r"VmHWM:\s+(\d+)", text)
    assert peak is not None, text
    out = size_of(place / "out")
    return {
        "asked": sum(int(last) + 1 - int(first) for first, last in asked),
        "peak_rss_mb": round(int(peak[1]) * 1024 / MB),
        "out_mb": round(out / MB, 1),
        "beside_out_mb": round(max(most - out - size_of(place / "said"), beside) / MB, 1),
    }


def measure(layers: int) -> dict[str, Any]:
    """Return what a streamed conversion of a model of so many layers takes."""
    with tempfile.TemporaryDirectory() as folder, Hub() as hub:
        size = publish(hub, layers, Path(folder) / "model")
        found = stream(hub, Path(folder) / "place")
        asked = round(found.pop("asked") / size, 3)
        return {"source_mb": round(size / MB, 1), "asked_of_source": asked, **found}


def main() -> None:
    """Try all faults, measure; exit 1 if a fault was answered wrongly."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layers", type=int, nargs="*", default=[4, 16], help="of the models")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    started = time.monotonic()
    tried, wrong = try_all()
    seconds = time.monotonic() - started
    print(*wrong, sep="\n", end="", file=sys.stderr)
    streamed = [measure(layers) for layers in options.layers]
    line = fault_line("network faults", tried, tried - len(wrong), seconds, stream=streamed)
    print(json.dumps(line))
    if options.record:
        record(line)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
