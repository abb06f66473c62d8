"""How many rows and chunks of four-bit weights a program of packed_stream has on their way.

Chosen for: within packed_stream; never alone.

A program has one, two or four eights of rows; of gated ones, half are rows of gate and half of up.
A step of a warp is one or two chunks of all of them. The words of two steps are in registers, whose
number limits both the rows of a program and the programs of a multiprocessor.
"""

from __future__ import annotations

from typing import NamedTuple

from runtime.kernels.waves import MULTIPROCESSORS


class Plan(NamedTuple):
    """How a program goes through its rows.

    turns      eights of rows
    units      of a warp's step: chunks of each of them
    registers  of a thread at most
    """

    turns: int
    units: int
    registers: int


# H200, NVFP4 of 27B, one after another, us: gate and up 28.6; two eights, 96 registers 30.7. The
# rule's 14.3 with 112 or 128 registers, 15.0 with 104; one eight, 72 registers 16.0. down 14.9; two
# eights, 96 registers 17.1; one, 72 registers 18.5, 64 21.3: spilling costs more than programs that
# wait. Asking for later steps as far as the L2 cache costs 0.1 to 5 us everywhere.
_GATED = Plan(4, 4, 168)
_GATED_INT4 = Plan(2, 2, 128)  # a layer of 27B 78.0, by the plan above 83.3
_MANY = Plan(2, 2, 128)
_FEW = Plan(1, 2, 96)
_MANY_ROWS = 16 * 6 * MULTIPROCESSORS


def plan_of(n: int, halves: int, *, nvfp4: bool) -> Plan:
    """Return the plan for a weight of so many times n rows."""
    gated = _GATED if nvfp4 else _GATED_INT4
    plan = gated if halves == 2 else _MANY if n >= _MANY_ROWS else _FEW
    while plan.turns > halves and n < 8 * plan.turns // halves:
        plan = plan._replace(turns=plan.turns // 2)
    return plan


def chunks_at_once(chunks: int, most: int) -> int:
    """Return how many chunks of a warp a step has: of the most and one fewer, what fits better."""
    most = max(min(most, chunks), 1)
    return min(range(most, max(most - 2, 0), -1), key=lambda some: -(-chunks // some) * some)
