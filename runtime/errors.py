"""The errors of a request that a model cannot serve."""

from __future__ import annotations

from formats.errors import INPUT, MISUSED, Qwen35Error


class RequestError(Qwen35Error):
    """What is asked of a model cannot be done."""

    exit_code = MISUSED


class LogitsError(Qwen35Error):
    """A model computes NaN: the fault is in its weights or in a kernel."""

    exit_code = INPUT
