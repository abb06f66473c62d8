"""One file on the hub: its tensors without bytes, its blocks, and how far it is proven.

`read` gives a tensor on torch's meta device, which has a shape, views and an offset, but no bytes:
code that forgets to load rows fails loudly instead of computing with zeros.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from formats.safetensors.file import SafetensorsFile, torch_dtype
from formats.safetensors.header import Header
from qwen35_convert.errors import FetchError
from qwen35_convert.hub.files import Entry

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from qwen35_convert.hub.ranges import Memory

BLOCK_BYTES = 4 << 20
READS = 3


class RemoteFile(SafetensorsFile):
    """A safetensors file on the hub: its header, how to read bytes, how far it is proven.

    head        the first bytes, which hold the header: they are proven with the rest
    read_range  returns the bytes from start to stop
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        entry: Entry,
        head: bytes,
        read_range: Callable[[int, int], Memory],
        block: int = BLOCK_BYTES,
    ) -> None:
        super().__init__(path, header)
        self.entry, self.read_range, self.block = entry, read_range, block
        self.num_blocks = -(-entry.size // block)
        self.digests: list[bytes] = []
        self.proven = False
        self._head, self._proof = head, entry.proof()
        self._refused: tuple[str, str] | None = None

    def read(self, name: str) -> Tensor:
        """Return the tensor's shape and type, on the meta device."""
        import torch

        info = self.header.infos[name]
        return torch.empty(info.shape, dtype=torch_dtype(info.dtype), device="meta")

    def raw(self, _name: str) -> bytes | None:
        """Return None: the bytes are not here."""
        return None

    def release(self) -> None:
        """Do nothing: no page is held."""

    def read_block(self, number: int) -> Memory:
        """Return a block; a block that was hashed before must be the same again.

        FetchError for a file that was found to be wrong: items made from it must not be kept, so a
        second reading cannot redeem it.
        """
        if self._refused:
            raise self._wrong(*self._refused)
        start = number * self.block
        for _ in range(READS):
            data = self.read_range(start, min(start + self.block, self.entry.size))
            known = self.digests[number] if number < len(self.digests) else None
            if known is None or hashlib.sha256(data).digest() == known:
                return data
        what = f"{self.path.name}: bytes from {start}"
        raise FetchError(what, "other bytes than in the first pass", "the same bytes", "run again")

    def hash_block(self, data: Memory) -> None:
        """Hash the next block in order; FetchError if the file turns out not to be the listed one.

        The digest of each block is kept, so that a second reading is proven too.
        """
        start = len(self.digests) * self.block
        head = self._head[start : start + self.block]
        self._proof.update(data)
        self.digests.append(hashlib.sha256(data).digest())
        last = len(self.digests) == self.num_blocks
        if data[: len(head)] != head:
            self._refused = (
                "another header than when the conversion was planned",
                "the same header",
            )
        elif last:
            self._refused = self._proof.wrong()
        if self._refused:
            raise self._wrong(*self._refused)
        self.proven = last

    def _wrong(self, got: str, expected: str) -> FetchError:
        return FetchError(f"{self.path.name} is not what the hub lists", got, expected, "run again")
