"""The error of a request that a model cannot serve."""

from __future__ import annotations

from formats.errors import MISUSED, Qwen35Error


class RequestError(Qwen35Error):
    """What is asked of a model cannot be done."""

    exit_code = MISUSED
