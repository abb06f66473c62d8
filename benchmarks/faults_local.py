"""Convert a small model while this machine fails: kills, full and broken disks, Ctrl-C, races.

    python -m benchmarks.faults local [--what KIND ...] [--forms FORM ...] [--count 200] [--record]

What must hold after every fault: the exit code of its kind, one block on stderr and no traceback,
OUT absent or complete; and the same command again gives the bytes of an undisturbed run.

    kills       SIGKILL at random moments, again and again until a run comes through
    steps       SIGKILL at every call that changes the disk, one after another
    writes      ENOSPC and EIO at every such call; at every fourth also a disk that stays full
    full        real small file systems, one size after another (needs the right to mount)
    reads       EIO at every file opened; a source cut, removed or replaced before every row
    interrupts  SIGINT at random moments
    races       two conversions into one OUT
    hostile     every case of tests/hostile through the command

One JSON line for each kind is printed, and appended to benchmarks/results/faults.jsonl with
--record. Exit code 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.disk_faults import full, reads, steps, writes
from benchmarks.fault_jobs import FORMATS
from benchmarks.fault_scene import Scene
from benchmarks.faults import fault_line, record
from benchmarks.process_faults import hostile, interrupts, kills, races

KINDS = {
    kind.__name__: kind for kind in (kills, steps, writes, full, reads, interrupts, races, hostile)
}
NAMES = {
    "steps": "kills at every write",
    "writes": "write faults",
    "full": "full disks",
    "reads": "read faults",
    "hostile": "hostile inputs",
}


def try_all(what: str, scene: Scene, count: int) -> dict[str, object]:
    """Run every trial of a kind; print those that fail."""
    tried = ok = 0
    started = time.monotonic()
    for trial in KINDS[what](scene, count):
        try:
            faults = trial()
        except AssertionError as failure:
            tried += 1
            print(f"{what}, trial {tried}: {failure}", file=sys.stderr)
        else:
            faults = 1 if faults is None else faults
            tried, ok = tried + faults, ok + faults
    took = time.monotonic() - started
    return fault_line(NAMES.get(what, what), tried, ok, took, forms=scene.forms)


def main() -> None:
    """Try what is asked for; exit 1 if anything did not hold."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--what", nargs="+", choices=sorted(KINDS), default=list(KINDS))
    parser.add_argument("--forms", nargs="+", choices=sorted(FORMATS), default=list(FORMATS))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), options.seed, options.forms)
        for what in options.what:
            line = try_all(what, scene, options.count)
            failed |= line["ok"] != line["tried"]
            print(json.dumps(line), flush=True)
            if options.record:
                record(line)
    sys.exit(failed)


if __name__ == "__main__":
    main()
