"""A conversion that is interrupted as it comes to a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from qwen35_convert.calibration import executor


@contextmanager
def killed_at(stage: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interrupt what is calibrated within as it keeps what it has seen of a layer."""

    def killed(path, seen, left, append=executor.append_seen):
        if seen.stage == stage:
            raise KeyboardInterrupt
        append(path, seen, left)

    with monkeypatch.context() as patch:
        patch.setattr(executor, "append_seen", killed)
        with pytest.raises(KeyboardInterrupt):
            yield
