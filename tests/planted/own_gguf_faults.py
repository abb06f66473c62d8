"""Keys of a GGUF file that show without a source: of another kind, or against what is stored."""

from __future__ import annotations

from collections.abc import Iterator

from tests.planted import gguf_faults
from tests.planted.fault import ALONE, STRUCTURE, Fault

# Of the faults of metadata, those that no source is needed for.
SHOWN = (
    "file-type",
    "file-type-of-a-neighbour",
    "file-type-f16",
    "file-type-unknown",
    "kind-of-a-token",
    "kind-of-types",
    "kind-of-the-file-type",
    "kind-of-the-name",
    "kind-of-the-tokens",
)


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for fault in gguf_faults.cases():
        if fault.kind == "metadata" and fault.name in SHOWN:
            yield Fault(
                "metadata, alone", fault.name, fault.plant, fault.where, STRUCTURE,
                receipts=(ALONE,),
            )  # fmt: skip
