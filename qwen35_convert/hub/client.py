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

from formats.missing import near
from qwen35_convert.errors import FetchError, SaveError
from qwen35_convert.hub.address import repository_at
from qwen35_convert.hub.files import Entry

if TYPE_CHECKING:
    from collections.abc import Callable

    T = TypeVar("T")

TRIES = 5
LONGEST_WAIT = 300.0  # seconds; the hub counts requests in windows of five minutes
PASSING = frozenset({408, 429, 500, 502, 503, 504})
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

        for attempt in range(TRIES):
            try:
                return call()
            except FetchError:
                raise
            except (HTTPError, OSError, RuntimeError, ValueError) as caught:
                error = _root(caught)
                if attempt == TRIES - 1 or not _passes(error):
                    raise self._explained(error, what) from None
                wait = _wait(error, attempt)
                _LOG.warning("%s: %s; trying again in %.0f s", what, _line(error), wait)
                (self.sleep or time.sleep)(wait)
        raise AssertionError("the last try returns or raises")

    def _explained(self, error: Exception, what: str) -> FetchError:
        from huggingface_hub import errors

        page, status = f"{self.endpoint}/{self.repo}", _status(error)
        here = near(Path(self.repo))
        local = f"; a path that exists is {here}" if here else ""
        sent = error.response.request.headers if isinstance(error, errors.HfHubHTTPError) else {}
        with_token = "authorization" in sent
        got = f"HTTP {status}, with {'a' if with_token else 'no'} token"
        later = "run again later; finished files are kept"
        refused = (
            "the token was refused: renew HF_TOKEN, or " if with_token else "set HF_TOKEN, or "
        )
        token = {
            401: f"{refused}log in: hf auth login",
            403: "use a token that may read it, or write it",
        }
        rows = (
            (
                errors.GatedRepoError,
                f"{self.repo} is gated",
                got,
                "a token with access",
                f"log in and accept the terms at {page}, then set HF_TOKEN, or: hf auth login",
            ),
            (
                errors.RepositoryNotFoundError,
                f"{self.repo} is not at {self.endpoint}",
                got,
                "a repository there, or a local path",
                f"check the name; if private, set HF_TOKEN, or: hf auth login{local}",
            ),
            (
                errors.RevisionNotFoundError,
                f"{self.repo} has no {self.revision}",
                got,
                "a branch, a tag or a commit",
                f"see {page}/tree/main",
            ),
            (errors.HfHubHTTPError, what, got, "HTTP 200", token.get(status, later)),
            (
                Exception,
                what,
                _line(error),
                f"a hub at {self.endpoint}",
                f"check the network and HF_ENDPOINT, and {later}; "
                f"HF_HUB_OFFLINE=1 uses the cache{local}",
            ),
        )
        if isinstance(error, OSError) and error.filename:
            place = f"{error.filename}: {error.strerror}"
            fix = "choose another folder: -o, or HF_HOME for the cache"
            return SaveError(f"{what} cannot be saved", place, "a folder to write to", fix)
        return FetchError(*next(row[1:] for row in rows if isinstance(error, row[0])))


def open_hub(
    repo: str, revision: str | None, sleep: Callable[[float], object] | None = None
) -> Hub:
    """Return a repository on the hub of HF_ENDPOINT; no request is made yet."""
    from huggingface_hub import constants

    endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
    return Hub(endpoint, repo, revision or "main", sleep)


def _root(error: Exception) -> Exception:
    """Return the cause of "not found locally", or of "error while uploading".

    huggingface_hub raises these for most faults.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    wraps = isinstance(error, LocalEntryNotFoundError) or type(error) is RuntimeError
    cause = error.__cause__ if wraps else None
    return cause if isinstance(cause, Exception) else error


def _status(error: Exception) -> int:
    """Return the HTTP status of an answer, 0 if there was none."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def _passes(error: Exception) -> bool:
    """Whether to try again: after a cut, a short body, a busy server; not with a full disk."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    if isinstance(error, HfHubHTTPError):
        signed = "authorization" not in error.response.request.headers  # 403: its time ran out
        return _status(error) in PASSING or (_status(error) == 403 and signed)
    short_body = type(error) is OSError and not error.errno
    return short_body or isinstance(error, (HTTPError, RuntimeError))


def _wait(error: Exception, attempt: int) -> float:
    """Return the wait that a server demands (the hub: RateLimit: "api";r=0;t=55), or 1, 2, 4, 8."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    text = f"after={headers.get('Retry-After')}; {headers.get('RateLimit')}"
    demand = re.search(r"(?:after|r=0; ?t)=(\d+)", text)
    return min(LONGEST_WAIT, float(demand[1]) if demand else 2.0**attempt)


def _line(error: Exception) -> str:
    """Return an error's first line, without signatures and tokens."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"hf_\w+", "hf_...", re.sub(r"\?\S+", "?...", text.splitlines()[0]))
