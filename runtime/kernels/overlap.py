"""Let a kernel start while the one before it still runs (programmatic dependent launch, sm_90).

A kernel launched with `early()` may be on the device before its predecessor has finished. Before
`wait_for_inputs` it must not write, nor read anything but weights, which no kernel writes, and what
was complete before a kernel that is not launched early. Every such kernel has to wait, even if it
needs nothing from its predecessor: its successors rely on that.

Trap: the compiler moves waits and reads. tests/runtime/kernels/test_early_kernels.py has a table of
what each kernel does before it waits, and compares it with compiled code.

In the interpreter kernels run one after another, and nothing here does anything.
"""

from __future__ import annotations

from runtime.kernels.launch import HAS_TRITON, INTERPRET, jit, tl


def early() -> dict[str, bool]:
    """Return the launch option of a kernel that waits for its inputs itself."""
    return {"launch_pdl": True} if HAS_TRITON and not INTERPRET.value else {}


def at_once() -> dict[str, int]:
    """Return the launch option of a small kernel that asks for all its loads before it waits.

    If nothing is said, ptxas aims at 32 registers for such a kernel: it waits for some loads before
    it asks for others, most of a microsecond each time. Not for many programs, which take turns.
    """
    return {"maxnreg": 64}


@jit
def ask(pointers):
    """Ask for what these point to in memory, so that it is soon in the L2 cache."""
    if not INTERPRET:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@jit
def start_next():
    """Let the next kernel start, if it was launched early, once all programs have come here."""
    if not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def wait_for_inputs():
    """Wait until all kernels before this one have finished."""
    if not INTERPRET:
        tl.extra.cuda.gdc_wait()


@jit
def zero_when_ready():
    """Wait for inputs, and return 0: a load whose mask depends on it cannot come before."""
    zero = 0
    if not INTERPRET:
        zero = tl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.u32 $0, 0;",
            "=r",
            [],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return zero
