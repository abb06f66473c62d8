from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from runtime.kernels.launch import HAS_TRITON


@pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
def test_compiled_kernels_wait_before_they_read_x():
    """The compiler may move a wait of its own behind the reads of the first iteration."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.kernels.linear.few_order"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    for name, events in json.loads(done.stdout).items():
        assert "x ahead" not in events, name
        loops = [i for i, event in enumerate(events) if event == "loop"]
        bodies = [events[i + 1 : j] for i, j in zip(loops, [*loops[1:], None], strict=True)]
        reading = [body for body in bodies if "x" in body]
        assert reading, name
        assert all(body[:2] == ["wait", "x"] for body in reading), name
