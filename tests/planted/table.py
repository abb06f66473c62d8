"""Every fault in every base, and every right artifact: what is tried, and what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tests.planted import (
    block_faults,
    cache_faults,
    code_faults,
    config_faults,
    count_faults,
    dialect_faults,
    extra_faults,
    fed_back_faults,
    field_type_faults,
    fourbit_faults,
    fourbit_file_faults,
    gguf_faults,
    group_faults,
    header_faults,
    index_faults,
    name_faults,
    order_faults,
    own_gguf_faults,
    part_faults,
    place_faults,
    quantization_faults,
    receipt_faults,
    rounded_faults,
    side_faults,
    source_faults,
    token_name_faults,
    type_faults,
    value_faults,
    vision_faults,
    weighed_faults,
)
from tests.planted.artifact import BASES, CACHED, FEW_BITS, Base
from tests.planted.fault import Case, Fault

TABLES = (
    config_faults,
    field_type_faults,
    place_faults,
    quantization_faults,
    group_faults,
    side_faults,
    extra_faults,
    token_name_faults,
    index_faults,
    header_faults,
    count_faults,
    type_faults,
    name_faults,
    order_faults,
    value_faults,
    source_faults,
    code_faults,
    block_faults,
    gguf_faults,
    own_gguf_faults,
    part_faults,
    vision_faults,
    receipt_faults,
)


def faults() -> list[Fault]:
    """Return every fault."""
    return [fault for every, _ in _placed() for fault in every]


def _of_all() -> list[Fault]:
    return [fault for table in TABLES for fault in table.cases()]


def _placed() -> Iterator[tuple[list[Fault], tuple[Base, ...]]]:
    """Yield faults with the bases that they may be planted into."""
    yield _of_all(), BASES
    few = (
        fourbit_faults, fourbit_file_faults, rounded_faults, weighed_faults, dialect_faults,
        fed_back_faults,
    )  # fmt: skip
    yield [fault for table in few for fault in table.cases()], FEW_BITS
    yield [*cache_faults.cases()], CACHED


def cases() -> Iterator[Case]:
    """Yield every fault in every base that it applies to, with every kind of receipt."""
    for every, bases in _placed():
        for fault in every:
            for base in filter(fault.where, bases):
                for receipt in fault.receipts:
                    yield Case(fault, base, receipt)


def sample(every: Iterable[Case]) -> set[str]:
    """Return the ids of one case of each kind in each output, with one and the other receipt."""
    chosen: dict[tuple[str, str], str] = {}
    for case in every:
        key = case.fault.kind, case.base.output
        odd = len(chosen) % 2 and len(case.fault.receipts) > 1
        if key not in chosen and case.receipt == case.fault.receipts[odd]:
            chosen[key] = case.id
    return set(chosen.values())
