"""A checkpoint from the hub: only the files a conversion needs, at one commit, every byte checked.

    revision -> commit, once -> listing (sizes, hashes) -> each file at that commit -> checked

Source: huggingface_hub 2.4, `HfApi.model_info` and `hf_hub_download`.
Trap: a branch may move between two files; so a branch is asked for once, then only the commit.
Trap: huggingface_hub compares no hash of a plain HTTP download and takes a cached file when the hub
does not answer, so every file is measured. It resumes a cut file, but not in the next run.
Trap: it reads HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE when first imported; here, at each call.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    T = TypeVar("T")
    Files = dict[str, tuple[int, str]]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SIDE_FILES = (
    "config.json", "generation_config.json", INDEX,
    "tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt",
    "chat_template.jinja", "chat_template.json", "special_tokens_map.json", "added_tokens.json",
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
    "README.md", "LICENSE*", "NOTICE*",
)  # fmt: skip
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
TRIES = 5
LONGEST_WAIT = 300.0  # seconds; the hub counts requests in windows of five minutes
PASSING = frozenset({408, 429, 500, 502, 503, 504})
TIMEOUT = 30.0  # seconds, for the listing: model_info has none of its own

_NAME = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(rf"({_NAME}/{_NAME})(?:@([A-Za-z0-9_][A-Za-z0-9_.+/-]*))?")
_NO_REPO = re.compile(r"--|\.\.|//|/$|\.git(?:@|$)")
_SHARD = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9_.-]*/)*[A-Za-z0-9_-][A-Za-z0-9_.-]*\.safetensors")
_LOG = logging.getLogger(__name__)


class FetchError(ValueError):
    """The checkpoint cannot be had from the hub, or what came is not what the hub lists."""

    def __init__(self, subject: str, got: str, expected: str, remedy: str) -> None:
        lines = (subject, f"got       {got}", f"expected  {expected}", f"do        {remedy}")
        super().__init__("\n  ".join(lines))


@dataclass(frozen=True, slots=True)
class Fetched:
    """A checked checkpoint: its folder, its commit, and (size, sha256) of each file by name."""

    path: Path
    repo: str
    revision: str
    files: dict[str, tuple[int, str]]


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a file must be: LFS files have a sha256, small ones the id git gives their bytes."""

    size: int
    sha256: str | None
    git_id: str | None


def parse_repo(source: str) -> tuple[str, str | None] | None:
    """Return (repo, revision) of "owner/name[@revision]"; None for a local path or other text."""
    match = _REPO.fullmatch(source)
    if match is None or _NO_REPO.search(source) or Path(source).exists():
        return None
    if match[1].endswith((".safetensors", ".gguf", ".json", ".yaml")):
        return None  # a file that is not there, not a repository
    return match[1], match[2]


def fetch(
    repo: str,
    revision: str | None = None,
    to: Path | None = None,
    *,
    progress: bool = True,
    sleep: Callable[[float], None] = time.sleep,
) -> Fetched:
    """Return the checkpoint `repo` at `revision` (default: main), downloaded and checked.

    to     a plain folder; without it the hub's cache (HF_HOME). Finished files are kept in both, so
           an interrupted run goes on when it is run again.
    sleep  called with seconds between the tries of a failing request

    HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE are honoured. Offline, a complete snapshot in
    the cache is checked and used.

    Raises FetchError if the hub refuses, does not answer, lacks a needed file or sends other bytes
    than it lists (such a download is removed), and if the disk is too small.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars

    constants.HF_HUB_DISABLE_TELEMETRY = True
    name = f"{repo}@{revision}" if revision else repo
    if not _REPO.fullmatch(name) or _NO_REPO.search(name):
        raise FetchError(repr(name), "no name on any hub", "owner/name[@revision]", "check it")
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    if offline or constants.is_offline_mode():
        return _cached(repo, revision or "main", to)
    with nullcontext() if progress else disable_progress_bars("huggingface_hub"):
        return _Download(repo, revision or "main", to, sleep).run()


def _cache(repo: str | None = None) -> Path:
    """Return the hub's cache, or the part of it that holds `repo`."""
    from huggingface_hub import constants

    env = os.environ.get
    default = Path(env("HF_HOME", ""), "hub") if env("HF_HOME") else constants.HF_HUB_CACHE
    cache = Path(env("HF_HUB_CACHE") or env("HUGGINGFACE_HUB_CACHE") or default).expanduser()
    return cache / f"models--{repo.replace('/', '--')}" if repo else cache


def _needed(repo: str, names: Collection[str], index: Path | None, remedy: str) -> list[str]:
    """Return the files of `names` that a conversion reads; refuse if one of them is not there."""
    shards = _indexed(repo, index) if index else [SINGLE]
    missing = sorted({"config.json", *shards}.difference(names))
    if index is None and SINGLE in missing:
        raise _no_safetensors(repo, sorted(n for n in names if n.endswith(WEIGHTS)), remedy)
    if missing:
        got = "no " + ", ".join(missing[:3]) + (" ..." if missing[3:] else "")
        raise FetchError(f"{repo} is incomplete", got, "config.json and all weights", remedy)
    side = (n for n in names if any(fnmatchcase(n, pattern) for pattern in SIDE_FILES))
    return sorted(n for n in side if "/" not in n and not n.endswith((*WEIGHTS, ".py"))) + shards


def _no_safetensors(repo: str, weights: list[str], remedy: str) -> FetchError:
    got = ", ".join(weights[:3]) + (" ..." if weights[3:] else "") or "no weights"
    if weights and weights[0].endswith((".safetensors", ".gguf")):
        remedy = f"fetch one file (hf download {repo} {weights[0]}) and give its path"
    elif weights:
        remedy = "torch.load it, safetensors.torch.save_file it (transformers would drop mtp.*)"
    return FetchError(f"{repo} has no {SINGLE}", got, f"{INDEX} or {SINGLE}", remedy)


def _indexed(repo: str, index: Path) -> list[str]:
    """Return the shards that an index names; their names come from a stranger and become paths."""
    try:
        shards = list(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise FetchError(f"{repo}: {INDEX}", got, "weight_map", "see its page") from None
    for shard in shards:
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            expected = "a relative path that ends in .safetensors"
            raise FetchError(f"{repo}: {INDEX} names", repr(shard), expected, "do not use it")
    return sorted(set(shards))


def _measure(path: Path, entry: _Entry) -> tuple[str, tuple[str, str] | None]:
    """Return (sha256, None) of a file that is what it must be, else ("", (got, expected))."""
    size = path.stat().st_size
    if size != entry.size:
        return "", (f"{size} bytes", f"{entry.size} bytes")
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    kind, got, expected = "sha256", sha256, entry.sha256
    if expected is None and entry.git_id:
        kind, expected = "git blob", entry.git_id
        got = hashlib.sha1(b"blob %d\0" % size + path.read_bytes()).hexdigest()
    if expected and got != expected:
        return "", (f"{kind} {got}", f"{kind} {expected}")
    return sha256, None


def _check(path: Path, entry: _Entry, *, ours: bool) -> tuple[int, str]:
    """Return (size, sha256); a wrong file is refused, and removed if it is `ours`."""
    sha256, wrong = _measure(path, entry)
    if wrong is None:
        return entry.size, sha256
    remedy = f"it was there before this run: delete {path.resolve()} and run again"
    if ours:
        path.resolve().unlink(missing_ok=True)  # in the cache, `path` is a link to this
        path.unlink(missing_ok=True)
        remedy = "that download was removed: run again"
    raise FetchError(f"{path.name} is not what the hub lists", *wrong, remedy)


def _refuse_foreign(folder: Path, entries: Mapping[str, _Entry]) -> None:
    """Keep a user's own files: huggingface_hub would replace one that differs."""
    for name, entry in entries.items():
        path, note = folder / name, folder / f".cache/huggingface/download/{name}.metadata"
        if note.is_file() and path.is_file() and path.stat().st_mtime <= note.stat().st_mtime + 1:
            continue
        if path.is_file() and (wrong := _measure(path, entry)[1]):
            remedy = "move it away, or give another folder"
            raise FetchError(f"{path} is no unchanged download", *wrong, remedy)


def _check_all(entries: Mapping[str, _Entry], get: Callable[[str], tuple[Path, bool]]) -> Files:
    """Return (size, sha256) of each file; one is hashed while the next is on its way."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashing frees the GIL
        checks = {}
        for name, entry in entries.items():
            path, ours = get(name)
            checks[name] = pool.submit(_check, path, entry, ours=ours)
        return {name: check.result() for name, check in checks.items()}


def _cached(repo: str, revision: str, to: Path | None) -> Fetched:
    """Return a complete snapshot of the cache, checked: the cache calls a file by its hash."""
    from huggingface_hub import try_to_load_from_cache

    subject, remedy = f"{repo}, offline (HF_HUB_OFFLINE)", "fetch it once without HF_HUB_OFFLINE"
    if to is not None:
        raise FetchError(subject, f"a download to {to}", "no folder: the cache is used", remedy)
    config = try_to_load_from_cache(repo, "config.json", _cache(), revision)
    if not isinstance(config, str):
        got = f"no {revision} of it in {_cache()}"
        raise FetchError(subject, got, "a complete snapshot", remedy)
    folder = Path(config).parent
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    entries = {}
    for name in _needed(repo, names, folder / INDEX if INDEX in names else None, remedy):
        blob = (folder / name).readlink().name if (folder / name).is_symlink() else ""
        sha256, git_id = (blob if len(blob) == digits else None for digits in (64, 40))
        entries[name] = _Entry((folder / name).stat().st_size, sha256, git_id)
    files = _check_all(entries, lambda name: (folder / name, False))
    return Fetched(folder, repo, folder.name, files)


@dataclass
class _Download:
    """One repository on its way into the cache or a folder, at what was `revision` at the start."""

    repo: str
    revision: str
    to: Path | None
    sleep: Callable[[float], None]
    endpoint: str = ""
    commit: str = ""
    listing: dict[str, _Entry] = field(default_factory=dict)

    def run(self) -> Fetched:
        """Resolve, list, download, check; only then note in the cache what the branch was."""
        self._list()
        index, ours = self._get(INDEX) if INDEX in self.listing else (None, False)
        if index:
            _check(index, self.listing[INDEX], ours=ours)
        remedy = f"see {self.endpoint}/{self.repo}/tree/{self.commit}"
        entries = {n: self.listing[n] for n in _needed(self.repo, self.listing, index, remedy)}
        if self.to:
            _refuse_foreign(self.to, entries)
        self._refuse_full_disk(entries)
        files = _check_all(entries, self._get)
        if self.to is None:
            self._note_branch()
        folder = self.to or _cache(self.repo) / "snapshots" / self.commit
        return Fetched(folder, self.repo, self.commit, files)

    def _list(self) -> None:
        from huggingface_hub import HfApi, constants

        self.endpoint = (os.environ.get("HF_ENDPOINT") or constants.ENDPOINT).rstrip("/")
        ask = partial(HfApi(self.endpoint).model_info, self.repo, revision=self.revision)
        what = f"the list of files of {self.repo}"
        info = self._tried(lambda: ask(files_metadata=True, timeout=TIMEOUT), what)
        if not re.fullmatch(r"[0-9a-f]{40}", info.sha or ""):
            raise FetchError(what, f"commit {info.sha}", "40 hex digits", "check HF_ENDPOINT")
        self.commit = str(info.sha)
        for file in info.siblings or []:
            size, sha256 = (file.lfs.size, file.lfs.sha256) if file.lfs else (file.size, None)
            if size is None:
                raise FetchError(what, "no sizes", f"that of {file.rfilename}", "check HF_ENDPOINT")
            self.listing[file.rfilename] = _Entry(size, sha256, file.blob_id)

    def _get(self, name: str) -> tuple[Path, bool]:
        """Return the file's path, and whether this call put it there."""
        from huggingface_hub import hf_hub_download

        get = partial(hf_hub_download, self.repo, name, revision=self.commit, local_dir=self.to)
        ask = partial(get, cache_dir=_cache(), endpoint=self.endpoint)
        before = self._stamp(name)
        path = self._tried(lambda: str(ask()), f"{self.repo}: {name}")
        return Path(path), before is None or before != self._stamp(name)

    def _stamp(self, name: str) -> tuple[int, int] | None:
        """Return what changes when a file is replaced, None if there is none."""
        entry = self.listing[name]
        blob = entry.sha256 or entry.git_id or "-"
        path = self.to / name if self.to else _cache(self.repo) / "blobs" / blob
        return (path.stat().st_ino, path.stat().st_mtime_ns) if path.is_file() else None

    def _refuse_full_disk(self, entries: Mapping[str, _Entry]) -> None:
        needed = sum(e.size for name, e in entries.items() if self._stamp(name) is None)
        folder = (self.to or _cache()).absolute()
        free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
        if needed > free:
            remedy = "make room, or give another folder (-o, HF_HOME)"
            raise FetchError(f"{folder} is too small", f"{free} bytes", f"{needed} bytes", remedy)

    def _note_branch(self) -> None:
        """Write what commit a branch was, as the cache keeps it, so that it is found offline."""
        if self.revision == self.commit:
            return
        ref = _cache(self.repo) / "refs" / self.revision
        part = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
        with suppress(OSError):  # a cache may be read-only
            ref.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(self.commit)
            part.replace(ref)

    def _tried(self, call: Callable[[], T], what: str) -> T:
        """Return call(), tried again while its fault is one that passes."""
        from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

        for attempt in range(TRIES):
            try:
                return call()
            except (HTTPError, OSError, RuntimeError, ValueError) as caught:
                error = _root(caught)
                if attempt == TRIES - 1 or not _passes(error):
                    raise self._explained(error, what) from None
                wait = _wait(error, attempt)
                _LOG.warning("%s: %s; trying again in %.0f s", what, _line(error), wait)
                self.sleep(wait)
        raise AssertionError("the last try returns or raises")

    def _explained(self, error: Exception, what: str) -> FetchError:
        from huggingface_hub import errors

        page, status = f"{self.endpoint}/{self.repo}", _status(error)
        asked = error.response.request.headers if isinstance(error, errors.HfHubHTTPError) else {}
        got = f"HTTP {status}, with {'a' if 'authorization' in asked else 'no'} token"
        later = "run again later; finished files are kept"
        token = {401: "the token was refused: renew HF_TOKEN", 403: "use a token that may read it"}
        rows = (
            (errors.GatedRepoError, f"{self.repo} is gated", got, "a token with access",
             f"log in and accept the terms at {page}, then set HF_TOKEN"),
            (errors.RepositoryNotFoundError, f"{self.repo} is not at {self.endpoint}", got,
             "a repository there, or a path here", "check the name; if private, set HF_TOKEN"),
            (errors.RevisionNotFoundError, f"{self.repo} has no {self.revision}", got,
             "a branch, a tag or a commit", f"see {page}/tree/main"),
            (errors.HfHubHTTPError, what, got, "HTTP 200", token.get(status, later)),
            (Exception, what, _line(error), f"a hub at {self.endpoint}",
             f"check the network, HF_ENDPOINT, the disk; {later}; HF_HUB_OFFLINE=1 uses the cache"),
        )  # fmt: skip
        return FetchError(*next(row[1:] for row in rows if isinstance(error, row[0])))


def _root(error: Exception) -> Exception:
    """Return what lies under "not found locally", which huggingface_hub says of most faults."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
    return cause if isinstance(cause, Exception) else error


def _status(error: Exception) -> int:
    """Return the HTTP status of an answer, 0 if there was none."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def _passes(error: Exception) -> bool:
    """Tell whether to try again: after a cut, a short body, a busy server; not with a full disk."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    if isinstance(error, HfHubHTTPError):
        signed = "authorization" not in error.response.request.headers  # 403: its time ran out
        return _status(error) in PASSING or (_status(error) == 403 and signed)
    short_body = type(error) is OSError and not error.errno
    return short_body or isinstance(error, (HTTPError, RuntimeError))


def _wait(error: Exception, attempt: int) -> float:
    """Return the seconds a server asks for (the hub: RateLimit: "api";r=0;t=55), or 1, 2, 4, 8."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    text = f"after={headers.get('Retry-After')}; {headers.get('RateLimit')}"
    asked = re.search(r"(?:after|r=0; ?t)=(\d+)", text)
    return min(LONGEST_WAIT, float(asked[1]) if asked else 2.0**attempt)


def _line(error: Exception) -> str:
    """Return an error's first line, less what a signed address or a token would give away."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"hf_\w+", "hf_...", re.sub(r"\?\S+", "?...", text.splitlines()[0]))
