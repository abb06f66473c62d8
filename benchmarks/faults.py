"""All faults: those of this machine (faults_local) and those of the network (faults_network).

Run as `python -m benchmarks.faults local` or `network`, with the options of that module.
"""

from __future__ import annotations

import runpy
import sys

KINDS = ("local", "network")


def main() -> None:
    """Run one of the modules with the options that follow its name."""
    if len(sys.argv) < 2 or sys.argv[1] not in KINDS:
        sys.exit(f"usage: faults {'|'.join(KINDS)} [options]")
    module = f"benchmarks.faults_{sys.argv[1]}"
    sys.argv = [module, *sys.argv[2:]]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main()
