"""Parts of one file on the hub by HTTP range requests, each answer compared with its request.

    HEAD resolve/{commit}/{file}  -> commit, ETag, size, a signed address that expires
    GET  that address, Range      -> 206, Content-Range and length exact, the ETag of the first part
                                     (200 where the whole file is asked for)

Source: RFC 9110, sections 13.1.5 and 14; huggingface_hub 2.4, `get_hf_file_metadata`.
Trap: a server may answer a range with the whole file (200); so headers are checked before the body.
Trap: the token is for the hub only; a signed address at another origin must not receive it.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from qwen35_convert.errors import FetchError
from qwen35_convert.hub.client import TIMEOUT, Hub
from qwen35_convert.hub.files import Entry

if TYPE_CHECKING:
    from httpx2 import Response
    from huggingface_hub import HfFileMetadata

STRONG_ETAG = '"'
OWN_PAGES = 1 << 18
Memory = bytearray | mmap.mmap


@dataclass
class RangeReader:
    """One file at one commit: `reader(start, stop)` returns these bytes, or raises FetchError.

    Safe from any thread. Transient faults (cut connections, busy servers, expired addresses,
    answers to another request) are retried with a fresh address.
    """

    hub: Hub
    commit: str
    name: str
    entry: Entry
    _address: str = field(default="", init=False)
    _etag: str = field(default="", init=False)
    _lock: Lock = field(default_factory=Lock, init=False)

    def __call__(self, start: int, stop: int) -> Memory:
        """Return the bytes from start to stop."""
        what = f"{self.hub.repo}: {self.name}, bytes {start} to {stop}"
        return self.hub.tried(lambda: self._get(start, stop), what)

    def _get(self, start: int, stop: int) -> Memory:
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

        address, etag = self._locate()
        try:
            return self._ask(address, etag, start, stop)
        except (HTTPError, OSError):
            with self._lock:
                if self._address == address:
                    self._address = self._etag = ""
            raise

    def _locate(self) -> tuple[str, str]:
        """Return the address of the bytes, and their ETag once an answer has named it."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        with self._lock:
            if not self._address:
                url = hf_hub_url(
                    self.hub.repo, self.name, revision=self.commit, endpoint=self.hub.endpoint
                )
                metadata = get_hf_file_metadata(url, timeout=TIMEOUT, endpoint=self.hub.endpoint)
                self._refuse_other(metadata)
                self._address = metadata.location
            return self._address, self._etag

    def _refuse_other(self, metadata: HfFileMetadata) -> None:
        """Refuse a file that is not the listed one: the revision was changed meanwhile."""
        entry = self.entry
        got = (metadata.commit_hash, metadata.size, metadata.etag)
        listed = (self.commit, entry.size, entry.sha256 or entry.git_id)
        if got != listed:
            raise FetchError(
                f"{self.hub.repo}: {self.name} is not the listed file",
                "commit {}, {} bytes, ETag {}".format(*got),
                "commit {}, {} bytes, ETag {}".format(*listed),
                "run again",
            )

    def _ask(self, address: str, etag: str, start: int, stop: int) -> Memory:
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            get_session,
            hf_raise_for_status,
        )

        headers = self._headers(address)
        if stop - start < self.entry.size:
            headers |= {"range": f"bytes={start}-{stop - 1}"}
            headers |= {"if-range": etag} if etag.startswith(STRONG_ETAG) else {}
        with get_session().stream("GET", address, headers=headers, timeout=TIMEOUT) as answer:
            if answer.status_code >= 400:
                answer.read()
            hf_raise_for_status(answer)
            self._check(answer, etag, start, stop)
            return _body(answer, stop - start)

    def _headers(self, address: str) -> dict[str, str]:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        at_hub = urlsplit(address)[:2] == urlsplit(self.hub.endpoint)[:2]
        headers = build_hf_headers(token=None if at_hub else False)
        return headers | {"accept-encoding": "identity"}

    def _check(self, answer: Response, etag: str, start: int, stop: int) -> None:
        """Compare the headers with the request, before the body is read."""
        expected = {"status": "200", "content-length": str(stop - start)}
        if stop - start < self.entry.size:
            span = f"bytes {start}-{stop - 1}/{self.entry.size}"
            expected |= {"status": "206", "content-range": span}
        got = {"status": str(answer.status_code)} | dict(answer.headers.items())
        for key, value in expected.items():
            if got.get(key) != value:
                raise OSError(f"{key} is {got.get(key)}, expected {value}")
        now = got.get("etag", "")
        if etag and now != etag:
            raise OSError(f"etag is {now}, expected {etag}: the file was changed")
        with self._lock:
            self._etag = self._etag or now


def take_memory(count: int) -> Memory:
    """Return zeroed memory to write to; large blocks are returned to the system when dropped.

    malloc would keep them: threads that allocate megabytes in turn fragment its arenas.
    """
    return mmap.mmap(-1, count) if count >= OWN_PAGES else bytearray(count)


def _body(answer: Response, count: int) -> Memory:
    """Return a body of `count` bytes."""
    body, have = take_memory(count), 0
    with memoryview(body) as view:
        for part in answer.iter_raw():
            view[have : have + len(part)] = part
            have += len(part)
    if have != count:
        raise OSError(f"{have} bytes received, expected {count}")
    return body
