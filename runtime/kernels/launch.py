"""What every kernel file shares: when a Triton kernel runs, and how it is defined.

On CUDA tensors the kernels run compiled. On CPU tensors a wrapper takes its plain-torch reference,
unless a test asks for Triton's interpreter: TRITON_INTERPRET=1 must be in the environment before
triton is first imported, and the call must stand in `with interpreting():`. Without triton (macOS)
every kernel file still imports, and its wrappers take the references.

Traps: in the interpreter bfloat16 arithmetic and bfloat16 `tl.dot` give garbage, and float32 to
bfloat16 truncates where a GPU rounds to nearest even. Hence every load is cast to float32, dot
operands go through `operand`, and interpreter tests use float32. Two autotune configs or more fail
there: `configs` leaves one. `tl.dot` takes any shape there, a GPU only edges of 16 and more.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runtime.kernels.interpreter import quicker

try:
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    HAS_TRITON = True
    INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
except ImportError:
    triton, tl, interpreter, HAS_TRITON, INTERPRET = None, None, None, False, None

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl

    # earlier ones start the parts of a kernel's warps in another way
    HAS_GLUON = tuple(int(n) for n in triton.__version__.split(".")[:2]) >= (3, 6)
except ImportError:
    gluon, gl, HAS_GLUON = None, None, False

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "HAS_GLUON",
    "HAS_TRITON",
    "INTERPRET",
    "autotune",
    "capability",
    "configs",
    "gl",
    "gluon_jit",
    "gluon_runs",
    "interpreting",
    "jit",
    "loaded",
    "operand",
    "power_of_two",
    "ragged_block",
    "ragged_blocks",
    "tl",
    "use_triton",
    "widen",
    "widened",
]

_interpreting: ContextVar[bool] = ContextVar("interpreting", default=False)


@contextmanager
def interpreting() -> Iterator[None]:
    """Run Triton kernels on CPU tensors in the interpreter while the context lasts (tests only)."""
    assert HAS_TRITON, "interpreting() needs triton"
    assert INTERPRET.value, "TRITON_INTERPRET=1 must be set before triton is first imported"
    token = _interpreting.set(True)
    try:
        with quicker(interpreter, tl):
            yield
    finally:
        _interpreting.reset(token)


def use_triton(x: Tensor) -> bool:
    """Return whether a wrapper given `x` launches its kernel instead of its reference."""
    return HAS_TRITON and (x.is_cuda or _interpreting.get())


@lru_cache
def capability(gpu: int) -> tuple[int, int]:
    """Return a GPU's compute capability, (0, 0) for the CPU.

    gpu  as `Tensor.get_device` gives it: below 0 for the CPU
    """
    return torch.cuda.get_device_capability(gpu) if gpu >= 0 else (0, 0)


def gluon_runs(gpu: int) -> bool:
    """Return whether kernels in Gluon run on a GPU, given as for `capability`: on Hopper alone."""
    return HAS_GLUON and capability(gpu) == (9, 0)


def jit(kernel: Callable[..., Any]) -> Any:
    """Return `triton.jit(kernel)`; without triton the function itself, which is never called."""
    return triton.jit(kernel) if HAS_TRITON else kernel


def gluon_jit(kernel: Callable[..., Any], **options: Any) -> Any:
    """Return `gluon.jit(kernel)`; without gluon the function itself, which is never called.

    Gluon is Triton's language of explicit layouts, for kernels whose warps have different parts.
    It has no interpreter.

    options  of `gluon.jit`
    """
    return gluon.jit(kernel, **options) if HAS_GLUON else kernel


def configs(choices: Sequence[Mapping[str, int]]) -> list[Any]:
    """Return Triton configs for `triton.autotune`: all on a GPU, the first in the interpreter.

    choices  block sizes by constexpr name, and optionally num_warps and num_stages
    """
    options = ("num_warps", "num_stages")
    return [
        triton.Config(
            {name: value for name, value in choice.items() if name not in options},
            **{name: value for name, value in choice.items() if name in options},
        )
        for choice in (choices[:1] if INTERPRET.value else choices)
    ]


def autotune(choices: Sequence[Mapping[str, int]], key: Sequence[str]) -> Callable[[Any], Any]:
    """Return the decorator `triton.autotune`, or without triton one that changes nothing.

    Not for kernels that update their inputs in place: tuning runs a kernel many times.
    """
    if not HAS_TRITON:
        return lambda kernel: kernel
    return triton.autotune(configs=configs(choices), key=list(key))  # type: ignore[no-any-return]


def widen(x: Tensor) -> Tensor:
    """Return `x` in float32, in which references compute, or in float64 if it already is."""
    return x if x.dtype == torch.float64 else x.float()


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`: what `tl.arange` can span."""
    return 1 << max(n - 1, 0).bit_length()


def ragged_blocks(num_tokens: int, num_sequences: int, size: int) -> int:
    """Return how many programs `ragged_block` needs to cover packed sequences in blocks of `size`.

    Sequence n owns the block numbers from cu_seqlens[n] // size + n on: enough for its
    ceil(length / size) blocks wherever it starts, and known without reading cu_seqlens.
    """
    return num_tokens // size + num_sequences


@jit
def operand(x):
    """Return a dot operand: as it is on a GPU, in float32 in the interpreter."""
    if INTERPRET:
        x = x.to(tl.float32)
    return x


@jit
def loaded(at, inside, step, COUNT: tl.constexpr):
    """Return a tuple of what lies at `at` and `step` apart from there on, 0 if not inside."""
    found = ()
    for j in tl.static_range(COUNT):
        found += (tl.load(at + j * step, mask=inside, other=0),)  # type: ignore[assignment]
    return found


@jit
def widened(values):
    """Return a tuple in float32.

    Values that are widened where they are loaded are waited for there, before the next load.
    """
    numbers = ()
    for j in tl.static_range(len(values)):
        numbers += (values[j].to(tl.float32),)  # type: ignore[assignment]
    return numbers


@jit
def ragged_block(block, cu_seqlens, num_sequences, SIZE: tl.constexpr, STEPS: tl.constexpr):
    """Return (sequence, its first token, its end, first token of `block`); the last may lie beyond.

    STEPS  at least log2(num_sequences): bisection for the last sequence that starts in or before
    """
    low = 0
    high = num_sequences - 1
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        before = tl.load(cu_seqlens + middle).to(tl.int32) // SIZE + middle <= block
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
    start = tl.load(cu_seqlens + low).to(tl.int32)
    end = tl.load(cu_seqlens + low + 1).to(tl.int32)
    first = start + (block - (start // SIZE + low)) * SIZE
    return low, start, end, first
