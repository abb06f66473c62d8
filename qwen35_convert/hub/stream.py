"""A checkpoint read straight from the hub: no local copy, only headers before the conversion.

    listing -> config, index, side files (whole, checked, in memory) -> each shard's header

A header decides where every tensor lies, so its bytes are verified with the rest of the file.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from formats.content import FIRST
from formats.json_file import parse_object
from formats.safetensors.choose import choose
from formats.safetensors.folder import (
    MAX_SIDE_BYTES,
    SIDE_FILES,
    Headers,
    assemble,
    check_config,
)
from formats.safetensors.header import header_length, parse_header
from formats.safetensors.methods import block_beside, with_block
from formats.safetensors.nested import is_nested
from formats.safetensors.placing import is_whole
from formats.side_names import CONFIG
from quant.registry import RECOGNISERS
from qwen35_convert.errors import FetchError
from qwen35_convert.hub.client import Hub, Listing, check_name, is_offline, open_hub
from qwen35_convert.hub.files import INDEX, needed, read_weight_map
from qwen35_convert.hub.ranges import RangeReader
from qwen35_convert.hub.remote_blocks import RemoteFiles
from qwen35_convert.hub.remote_file import BLOCK_BYTES, RemoteFile

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_BYTES = 1 << 20  # of a shard: its header, and of the largest ones nearly all of it
OPENING_THREADS = 8
NAP = 0.5


def open_stream(
    repo: str,
    revision: str | None = None,
    *,
    block: int = BLOCK_BYTES,
    sleep: Callable[[float], object] | None = None,
    listing: Listing | None = None,
) -> tuple[Checkpoint, str]:
    """Return the checkpoint `repo` at `revision` (default: main) and its commit.

    block    bytes of a range request while converting
    sleep    called with the seconds of a wait; None: time.sleep
    listing  the listing of `revision`, if it is known already

    FetchError if the hub refuses, does not answer, lacks a needed file, or sends other bytes than
    it lists. FormatError as for a folder.
    """
    check_name(repo, revision)
    if is_offline():
        remedy = "unset HF_HUB_OFFLINE, or convert from the cache without --stream"
        raise FetchError(
            f"{repo}, offline (HF_HUB_OFFLINE)", "a stream", "no use of the network", remedy
        )
    stop = Event()
    hub = open_hub(repo, revision, partial(_nap, stop, sleep or time.sleep))
    return _Opening(hub, listing or hub.listing(), block).checkpoint(stop)


def _nap(stop: Event, sleep: Callable[[float], object], seconds: float) -> None:
    """Wait in short naps, until the work is abandoned: a busy server may demand minutes."""
    for _ in range(math.ceil(seconds / NAP)):
        if stop.is_set():
            raise InterruptedError("the work was abandoned")
        sleep(NAP)


class _Opening:
    """The requests that open a stream; of a repository as the place where files are."""

    def __init__(self, hub: Hub, listing: Listing, block: int) -> None:
        self.hub, self.listing, self.block = hub, listing, block
        self.folder = Path(f"hf:{hub.repo}@{listing.commit}")
        self.sha256: dict[str, str] = {}
        self._contents: dict[str, bytes] = {}
        self._files: dict[str, RemoteFile] = {}

    @property
    def label(self) -> str:
        """The repository's name."""
        return self.hub.repo

    @property
    def names(self) -> frozenset[str]:
        """The files at its top."""
        return frozenset(name for name in self.listing.entries if "/" not in name)

    def path_of(self, name: str) -> str:
        """Return where a file is once it was downloaded."""
        return f"DIR/{name} (after `hf download {self.hub.repo} --local-dir DIR`)"

    @property
    def again(self) -> str:
        """Return where the files are listed."""
        return f"see {self.hub.page(self.commit)}"

    def identity(self, name: str) -> object:
        """Return what the listing says of its bytes."""
        return self.listing.entries[name]

    def read(self, name: str) -> dict[str, Any]:
        """Return the object in a JSON file."""
        return parse_object(self._small(name), name)

    def open(self, name: str) -> RemoteFile:
        """Return a file of weights, its header read."""
        if name not in self._files:
            self._files[name] = self._shard(name)
        return self._files[name]

    def checkpoint(self, stop: Event) -> tuple[Checkpoint, str]:
        """Return the checkpoint and the commit."""
        entries = self.listing.entries
        index = self._small(INDEX) if INDEX in entries else None
        weight_map = None if index is None else read_weight_map(self.hub.repo, index)
        names = needed(self.hub.repo, entries, weight_map, f"see {self.hub.page(self.commit)}")
        raw = self.read(CONFIG)
        config, beside = check_config(with_block(self, raw)), block_beside(self, raw)
        choice = choose(self, None, partial(is_whole, self, config, RECOGNISERS))
        with ThreadPoolExecutor(OPENING_THREADS) as pool:
            files = dict(zip(choice.names, pool.map(self.open, choice.names), strict=True))
            side_names = [name for name in names if name in SIDE_FILES or is_nested(name)]
            sides = dict(zip(side_names, pool.map(self._small, side_names), strict=True))
        name = self.hub.repo.rsplit("/", 1)[-1]
        headers = Headers(self.folder, name, config, files, choice, sides, beside)
        opened = assemble(headers, RECOGNISERS)
        identity = self._identity(names)
        remote = RemoteFiles(files, opened.where, identity, self.sha256, stop.set)
        return replace(opened, remote=remote), self.commit

    @property
    def commit(self) -> str:
        """The commit that all requests name."""
        return self.listing.commit

    def _identity(self, names: list[str]) -> dict[str, tuple[int, str]]:
        entries = {name: self.listing.entries[name] for name in names}
        return {name: (e.size, e.sha256 or e.git_id or "") for name, e in entries.items()}

    def _reader(self, name: str) -> RangeReader:
        return RangeReader(self.hub, self.commit, name, self.listing.entries[name])

    def _small(self, name: str) -> bytes:
        """Return a whole file, checked."""
        if name not in self._contents:
            self._contents[name] = self._fetch(name)
        return self._contents[name]

    def _fetch(self, name: str) -> bytes:
        entry = self.listing.entries[name]
        if entry.size > MAX_SIDE_BYTES:
            got, expected = f"{entry.size} bytes", f"at most {MAX_SIDE_BYTES}"
            raise FetchError(f"{self.hub.repo}: {name}", got, expected, "use another repository")
        data = self._reader(name)(0, entry.size) if entry.size else bytearray()
        proof = entry.proof()
        proof.update(data)
        if wrong := proof.wrong():
            raise FetchError(f"{name} is not what the hub lists", *wrong, "run again")
        self.sha256[name] = proof.sha256()
        return bytes(data)

    def _shard(self, name: str) -> RemoteFile:
        """Return a shard whose header has been read."""
        entry, read_range = self.listing.entries[name], self._reader(name)
        head = bytes(read_range(0, min(FIRST_BYTES, entry.size))) if entry.size else b""
        stop = 8 + header_length(name, entry.size, head[:FIRST])
        if stop > len(head):
            head += bytes(read_range(len(head), stop))
        header = parse_header(name, head[8:stop], entry.size)
        return RemoteFile(self.folder / name, header, entry, head[:stop], read_range, self.block)
