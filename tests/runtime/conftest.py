"""Without a GPU the Triton kernels are defined for the interpreter, and tests run them there.

The variable must be there before anything imports triton, and transformers imports it too.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from runtime.kernels import conditions, dispatch
from runtime.kernels.launch import HAS_TRITON, interpreting


@pytest.fixture
def interpreter():
    """Let every wrapper launch its Triton kernel, in the interpreter."""
    if torch.cuda.is_available():
        pytest.skip("the kernels are compiled here: hide the GPU to test them in the interpreter")
    if not HAS_TRITON:
        pytest.skip("triton is not installed")
    with interpreting():
        yield


@pytest.fixture
def thresholds(monkeypatch):
    """Return a function that moves thresholds of the dispatch table, by their names."""

    def forget():
        for operation in dispatch.OPERATIONS:
            operation.forget()

    def move(**values):
        for name, value in values.items():
            monkeypatch.setattr(conditions, name, value)
        forget()

    yield move
    forget()
