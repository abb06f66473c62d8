"""The hub itself: repository ids, the listing of one commit, transient and permanent faults.

    revision -> commit, resolved once -> every later request names the commit

Source: huggingface_hub 2.4, `HfApi.model_info`; its errors, and httpx's under them.
Trap: a branch may move between two files, so it is resolved once.
Trap: huggingface_hub reads HF_ENDPOINT and HF_HUB_OFFLINE when first imported; here, at each call.
"""

from __future__ import annotations

import logging
import os
import re
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from qwen35_convert.errors import FetchError
from qwen35_convert.hub.address import repository_at
from qwen35_convert.hub.faults import Asked, explained, line, passes, root, wait
from qwen35_convert.hub.files import Entry

if TYPE_CHECKING:
    from collections.abc import Callable

    T = TypeVar("T")

TRIES = 5
TIMEOUT = 30.0  # seconds without a byte; of its own, huggingface_hub would wait for the listing

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"({_NAME}/{_NAME})(?:@([A-Za-z0-9_][A-Za-z0-9_.+/-]*))?")
_NO_REPO = re.compile(r"--|\.\.|//|/$|\.git(?:@|$)")
_LOG = logging.getLogger(__name__)


def parse_repo(source: str) -> tuple[str, str | None] | None:
    """Return (repo, revision) of "owner/name[@revision]" or of its address on the hub.

    None for a local path or other text; FormatError for an address of something else on the hub.
    """
    if is_here(source):
        return None
    named = repository_at(source)
    source = "@".join(part for part in named if part) if named else source
    match = _REPO.fullmatch(source)
    if match is None or _NO_REPO.search(source):
        return None
    if match[1].endswith((".safetensors", ".gguf", ".json", ".yaml")):
        return None  # a file that is not there, not a repository
    return match[1], match[2]


def is_here(source: str) -> bool:
    """Tell whether a source is a path on this machine."""
    try:
        return Path(source).exists()
    except (OSError, ValueError):  # a name too long for any file, or with a zero in it
        return False


def check_name(repo: str, revision: str | None) -> None:
    """Refuse an invalid repository id before the network is used."""
    name = f"{repo}@{revision}" if revision else repo
    if not _REPO.fullmatch(name) or _NO_REPO.search(name):
        raise FetchError(
            repr(name), "not a repository id", "owner/name[@revision]", "check the name"
        )


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids the network."""
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_TELEMETRY = True
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    return offline or constants.is_offline_mode()


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit, by name."""

    commit: str
    entries: dict[str, Entry]


@dataclass(frozen=True, slots=True)
class Hub:
    """One repository, whose failing requests are retried.

    sleep  called with the seconds between two tries; None: time.sleep
    """

    endpoint: str
    repo: str
    revision: str
    sleep: Callable[[float], object] | None = None

    def listing(self) -> Listing:
        """Return the files of `revision` as it is now. FetchError if there is none, or no hub."""
        from huggingface_hub import HfApi

        ask = partial(HfApi(self.endpoint).model_info, self.repo, revision=self.revision)
        what = f"the list of files of {self.repo}"
        info = self.tried(lambda: ask(files_metadata=True, timeout=TIMEOUT), what)
        if not re.fullmatch(r"[0-9a-f]{40}", info.sha or ""):
            raise FetchError(what, f"commit {info.sha}", "40 hex digits", "check HF_ENDPOINT")
        entries = {}
        for file in info.siblings or []:
            size, sha256 = (file.lfs.size, file.lfs.sha256) if file.lfs else (file.size, None)
            if size is None:
                raise FetchError(what, f"no size of {file.rfilename}", "one", "check HF_ENDPOINT")
            entries[file.rfilename] = Entry(size, sha256, file.blob_id)
        return Listing(str(info.sha), entries)

    def page(self, commit: str) -> str:
        """Return the web page that lists the files of a commit."""
        return f"{self.endpoint}/{self.repo}/tree/{commit}"

    def tried(self, call: Callable[[], T], what: str) -> T:
        """Return call(), retried after a transient fault."""
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

        asked = Asked(self.endpoint, self.repo, self.revision)
        for attempt in range(TRIES):
            try:
                return call()
            except FetchError:
                raise
            except (HTTPError, OSError, RuntimeError, ValueError) as caught:
                error = root(caught)
                if attempt == TRIES - 1 or not passes(error):
                    raise explained(error, what, asked) from None
                seconds = wait(error, attempt)
                _LOG.warning("%s: %s; trying again in %.0f s", what, line(error), seconds)
                (self.sleep or time.sleep)(seconds)
        raise AssertionError("the last try returns or raises")


def open_hub(
    repo: str, revision: str | None, sleep: Callable[[float], object] | None = None
) -> Hub:
    """Return a repository on the hub of HF_ENDPOINT; no request is made yet."""
    from huggingface_hub import constants

    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    return Hub(endpoint, repo, revision or "main", sleep)
