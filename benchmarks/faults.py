"""All faults: those of this machine (faults_local) and those of the network (faults_network).

Run as `python -m benchmarks.faults local` or `network`, with the options of that module. Each kind
of fault gives one JSON line, {"what", "tried", "ok", ...}.
"""

from __future__ import annotations

import platform
import runpy
import sys
from pathlib import Path
from typing import Any

from benchmarks.convert import commit
from benchmarks.lines import append

KINDS = ("local", "network")
RESULTS = Path(__file__).parent / "results" / "faults.jsonl"


def fault_line(what: str, tried: int, ok: int, seconds: float, **more: Any) -> dict[str, Any]:
    """Return what is said of one kind of fault."""
    return {
        "what": what,
        "tried": tried,
        "ok": ok,
        **more,
        "seconds": round(seconds, 1),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "commit": commit(),
    }


def record(line: dict[str, Any]) -> None:
    """Append a line to the results."""
    append(RESULTS, line)


def main() -> None:
    """Run one of the modules with the options that follow its name."""
    if len(sys.argv) < 2 or sys.argv[1] not in KINDS:
        sys.exit(f"usage: faults {'|'.join(KINDS)} [options]")
    module = f"benchmarks.faults_{sys.argv[1]}"
    sys.argv = [module, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
