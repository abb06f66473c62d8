"""Rows of tensors whose bytes are on the hub, brought block by block as they are asked for.

`load` returns rows in memory of their own, which is freed with the tensor.

    planning   exact ranges: a few norms
    the pass   between `begin` and `finish`: whole blocks, hashed in order; every file that is read
               is read to its end, so that its SHA-256 can be compared with the hub's
    checking   the same blocks again in any order, each compared with its digest from the pass

An item that was converted before its file was hashed is not `proven`, and must not be journalled.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Condition
from typing import TYPE_CHECKING, Any

from qwen35_convert.errors import FetchError
from qwen35_convert.hub.ranges import Memory, take_memory
from qwen35_convert.hub.remote_file import RemoteFile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from formats.remote import Index

HELD_BLOCKS = 8
AHEAD = 4


class RemoteFiles:
    """The files of one checkpoint, and at most `HELD_BLOCKS` blocks of them in memory.

    identity   (size, hash) of every file of the source by its name, small ones too
    sha256     of those that were read whole while opening
    interrupt  called when the work is abandoned: readers stop waiting for a busy server
    """

    def __init__(
        self,
        files: Mapping[str, RemoteFile],
        where: Mapping[str, str],
        identity: Mapping[str, tuple[int, str]],
        sha256: Mapping[str, str],
        interrupt: Callable[[], object],
    ) -> None:
        self.files, self.where, self.identity, self.sha256 = files, where, identity, sha256
        self.interrupt = interrupt
        self._held: OrderedDict[tuple[str, int], Memory] = OrderedDict()
        self._coming: set[tuple[str, int]] = set()
        self._turn = Condition()
        self._by_blocks, self._proving = False, False
        self._begun: set[str] = set()
        self._ahead = ThreadPoolExecutor(max(1, AHEAD))

    @property
    def held_bytes(self) -> int:
        """The bytes of all blocks that are in memory, being read, or in use."""
        block = max((file.block for file in self.files.values()), default=0)
        return (HELD_BLOCKS + AHEAD + 1) * block

    def begin(self) -> None:
        """Read by blocks from now on, and hash them. FetchError without a SHA-256 to compare with.

        The receipt names that of every file; the git blob id of small files is another hash.
        """
        for name, file in sorted(self.files.items()):
            if file.entry.sha256 is None:
                got, expected = "no SHA-256 in the listing", "a file of LFS or Xet"
                raise FetchError(name, got, expected, "convert it without --stream")
        self._by_blocks = self._proving = True

    def finish(self) -> None:
        """Read and hash the rest of each file of the pass. FetchError if one is wrong."""
        for name in sorted(self._begun if self._proving else ()):
            file = self.files[name]
            while not file.proven:
                self._block(file, len(file.digests))
        self._proving = False

    def proven(self, names: Iterable[str]) -> bool:
        """Whether all files that hold these tensors have been hashed whole, and are correct."""
        return all(self.files[self.where[name]].proven for name in names)

    def describe(self, names: Iterable[str], read: Iterable[Path]) -> dict[str, dict[str, Any]]:
        """Return size and SHA-256 of each file by its name, as a receipt lists them.

        read  those that items were made from. They are proven, in this run or, if nothing of
              them was left to read, in the run before. For all others no hash is claimed.
        """
        proven = {path.name for path in read} if self._by_blocks else set()
        files = {}
        for name in sorted(names):
            size, listed = self.identity[name]
            sha256 = self.sha256.get(name) or (listed if name in proven else None)
            files[name] = {"size": size, "sha256": sha256}
        return files

    def load(self, name: str, data: Tensor, index: Index) -> Tensor:
        """Return rows of a stored tensor, of which `data` is a view without bytes."""
        import torch

        file = self.files[self.where[name]]
        if not isinstance(index, torch.Tensor):
            return self._load(file, name, data[index])
        parts = [self._load(file, name, data[start:stop]) for start, stop in _runs(index)]
        return torch.cat(parts) if parts else torch.empty(data[:0].shape, dtype=data.dtype)

    def _load(self, file: RemoteFile, name: str, part: Tensor) -> Tensor:
        import torch

        if not part.numel():
            return torch.empty(part.shape, dtype=part.dtype)
        whole = file.infos[name].nbytes
        assert part.is_contiguous(), f"{name} is cut along its leading axes only"
        assert part.untyped_storage().nbytes() == whole, f"{name} is a view, not a copy"
        start = file.ranges[name][0] + part.storage_offset() * part.element_size()
        raw = self._bytes(file, int(start), int(start + part.nbytes))
        return torch.frombuffer(raw, dtype=part.dtype).view(part.shape)

    def _bytes(self, file: RemoteFile, start: int, stop: int) -> Memory:
        step, data = file.block, take_memory(stop - start)
        for number in range(start // step, -(-stop // step)):
            first, last = max(start, number * step), min(stop, (number + 1) * step)
            if self._by_blocks:
                block = memoryview(self._block(file, number))
                data[first - start : last - start] = block[first % step :][: last - first]
            else:
                data[first - start : last - start] = file.read_range(first, last)
        return data

    def _block(self, file: RemoteFile, number: int) -> Memory:
        """Return a block; then evict old ones, after reading the block that hashing waits for."""
        self._begun.add(file.path.name)
        self._look_ahead(file, number)
        data = self._obtain(file, number)
        while gap := self._evict():
            self._obtain(*gap)
        return data

    def _look_ahead(self, file: RemoteFile, number: int) -> None:
        """Prefetch the next blocks; a failed one is retried by the reader that needs the block."""
        with self._turn:
            for ahead in range(number + 1, min(number + 1 + AHEAD, file.num_blocks)):
                key = (file.path.name, ahead)
                if len(self._coming) < AHEAD and not (key in self._held or key in self._coming):
                    self._coming.add(key)
                    self._ahead.submit(self._bring, file, ahead)

    def _obtain(self, file: RemoteFile, number: int) -> Memory:
        """Return a block from memory, from a read under way, or read now."""
        key = (file.path.name, number)
        with self._turn:
            self._turn.wait_for(lambda: key not in self._coming)
            if key in self._held:
                self._held.move_to_end(key)
                return self._held[key]
            self._coming.add(key)
        return self._bring(file, number)

    def _bring(self, file: RemoteFile, number: int) -> Memory:
        """Read a block that is marked as under way, keep it, hash what is next in order."""
        key = (file.path.name, number)
        try:
            data = file.read_block(number)
            with self._turn:
                self._held[key] = data
                if self._proving:
                    self._hash(file)
        finally:
            with self._turn:
                self._coming.discard(key)
                self._turn.notify_all()
        return data

    def _hash(self, file: RemoteFile) -> None:
        """Hash the blocks that are next in order, as far as they are in memory."""
        while (key := (file.path.name, len(file.digests))) in self._held:
            file.hash_block(self._held[key])

    def _evict(self) -> tuple[RemoteFile, int] | None:
        """Drop the oldest hashed blocks; return the block that hashing waits for, if any."""
        with self._turn:
            for key in list(self._held):
                if len(self._held) <= HELD_BLOCKS:
                    return None
                if not self._proving or key[1] < len(self.files[key[0]].digests):
                    del self._held[key]
            if len(self._held) <= HELD_BLOCKS:
                return None
            file = self.files[next(iter(self._held))[0]]
            return file, len(file.digests)


def _runs(index: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the runs of consecutive rows in an index, in its order."""
    if not len(index):
        return
    ends = (index.diff() != 1).nonzero().flatten() + 1
    for first, last in pairwise([0, *ends.tolist(), len(index)]):
        yield int(index[first]), int(index[last - 1]) + 1
