"""What the compiler makes of kernels, read in a process that does not interpret them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def compiled_by(module: str) -> Any:
    """Return what a module of these tests prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.runtime.kernels.{module}"],
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)
