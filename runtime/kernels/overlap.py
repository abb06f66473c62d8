"""Let a kernel start while the one before it still runs (programmatic dependent launch, sm_90).

A kernel launched with `early()` may be on the device before its predecessor has finished. Before
`wait_for_inputs` it must not write, nor read anything but weights, which no kernel writes. Every
kernel launched so has to wait, also one that needs nothing of its predecessor: its successors rely
on it for all kernels before.

In the interpreter kernels run one after another, and nothing here does anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.kernels.launch import HAS_TRITON, INTERPRET, jit, tl

if TYPE_CHECKING:
    from torch import Tensor

# programs that ask
ASKING = tl.constexpr(64) if HAS_TRITON else 64


@dataclass(frozen=True)
class Soon:
    """What a kernel soon reads of one sequence: its rows of two pools, and a small weight.

    A longer kernel before it asks for them, so that they are in the L2 cache by then: loads of its
    own would wait behind that kernel's. More than a few megabytes only delay what is needed first.

    slots  [1] the row; negative: whatever is in the first
    pools  [S, ...] each, rows contiguous
    """

    slots: Tensor
    pools: tuple[Tensor, Tensor]
    weight: Tensor

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        """Return what `ask_for` takes."""
        rows = [(x, x.stride(0) * x.element_size(), x[0].nbytes // 16 * 16) for x in self.pools]
        return self.slots, *rows[0], *rows[1], self.weight, self.weight.nbytes // 16 * 16


NOTHING = (None, None, 0, 0, None, 0, 0, None, 0)


def early() -> dict[str, bool]:
    """Return the launch option of a kernel that waits for its inputs itself."""
    return {"launch_pdl": True} if HAS_TRITON and not INTERPRET.value else {}


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
def ask_for(
    slots, first, first_row, first_size, second, second_row, second_size, weight, weight_size,
    program, THREADS: tl.constexpr,
):  # fmt: skip
    """Ask for what `Soon` names; sizes in bytes, multiples of 16."""
    if slots is not None and program < ASKING:
        lane = program * THREADS + tl.arange(0, THREADS)
        slot = tl.maximum(tl.load(slots), 0).to(tl.int64)
        _ask(first, slot * first_row, first_size, lane, THREADS)
        _ask(second, slot * second_row, second_size, lane, THREADS)
        _ask(weight, slot * 0, weight_size, lane, THREADS)


@jit
def _ask(pointer, offset, size, lane, THREADS: tl.constexpr):
    if not INTERPRET:
        part = tl.cdiv(size, ASKING * THREADS * 16) * 16
        at = pointer.to(tl.pointer_type(tl.uint8)) + offset + lane.to(tl.int64) * part
        left = tl.minimum(size - lane * part, part)
        tl.inline_asm_elementwise(
            """{
            .reg .pred some;
            setp.gt.s32 some, $2, 0;
            @some cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.b32 $0, 0;
            }""",
            "=r,l,r", [at, left], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
