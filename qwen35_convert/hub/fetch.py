"""A checkpoint from the hub: only the files a conversion needs, at one commit, every byte checked.

    listing (sizes, hashes) -> each file at that commit -> checked against it

Source: huggingface_hub 2.4, `hf_hub_download`.
Trap: huggingface_hub compares no hash of a plain HTTP download and takes a cached file when the hub
does not answer, so every file is hashed here. It resumes a cut file, but not in the next run.
Trap: it reads HF_HOME when first imported; here, at each call.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from formats.errors import NOTHING
from qwen35_convert.errors import FetchError, SaveError
from qwen35_convert.hub.client import Hub, Listing, check_name, is_offline, open_hub
from qwen35_convert.hub.files import (
    INDEX,
    MODEL,
    WEIGHTS,
    Entry,
    Kind,
    measure,
    needed,
    read_weight_map,
    side_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Files = dict[str, tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A checked checkpoint: its folder, its commit, and (size, sha256) of each file by name."""

    path: Path
    repo: str
    revision: str
    files: dict[str, tuple[int, str]]


def fetch(
    repo: str,
    revision: str | None = None,
    to: Path | None = None,
    *,
    kind: Kind = MODEL,
    progress: bool = True,
    sleep: Callable[[float], object] | None = None,
) -> Fetched:
    """Return the checkpoint `repo` at `revision` (default: main), downloaded and checked.

    to     a plain folder; without it the hub's cache (HF_HOME). Finished files are kept in both, so
           an interrupted run is resumed by running it again.
    kind   which files are needed: a model's, or an adapter's
    sleep  called with seconds between the tries of a failing request; None: time.sleep

    HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE are honoured. Offline, a complete snapshot in
    the cache is checked and used.

    Raises FetchError if the hub refuses, does not answer, lacks a needed file or sends other bytes
    than it lists (such a download is removed), and if the disk is too small.
    """
    from huggingface_hub.utils.tqdm import disable_progress_bars

    check_name(repo, revision)
    if is_offline():
        return _cached(repo, revision or "main", to, kind)
    hub = open_hub(repo, revision, sleep)
    with nullcontext() if progress else disable_progress_bars("huggingface_hub"):
        download = _Download(hub, to, hub.listing(), kind)
        try:
            return download.run()
        except FetchError as error:
            error.left = error.left if error.left != NOTHING else download.left()
            raise


def _cache(repo: str | None = None) -> Path:
    """Return the hub's cache, or the part of it that holds `repo`."""
    from huggingface_hub import constants

    env = os.environ.get
    default = Path(env("HF_HOME", ""), "hub") if env("HF_HOME") else constants.HF_HUB_CACHE
    cache = Path(env("HF_HUB_CACHE") or env("HUGGINGFACE_HUB_CACHE") or default).expanduser()
    return cache / f"models--{repo.replace('/', '--')}" if repo else cache


def _check(path: Path, entry: Entry, *, ours: bool) -> tuple[int, str]:
    """Return (size, sha256); a wrong file is refused, and removed if it is `ours`."""
    sha256, wrong = measure(path, entry)
    if wrong is None:
        return entry.size, sha256
    remedy = f"it was there before this run: delete {path.resolve()} and run again"
    if ours:
        path.resolve().unlink(missing_ok=True)  # in the cache, `path` is a link to this
        path.unlink(missing_ok=True)
        remedy = "that download was removed: run again"
    raise FetchError(f"{path.name} is not what the hub lists", *wrong, remedy)


def _note(folder: Path, name: str) -> Path:
    """Return where huggingface_hub notes the commit of a file that it put into a folder."""
    return folder / f".cache/huggingface/download/{name}.metadata"


def _refuse_foreign(folder: Path, entries: Mapping[str, Entry]) -> None:
    """Refuse to touch a user's own files: huggingface_hub would replace one that differs."""
    for name, entry in entries.items():
        path, note = folder / name, _note(folder, name)
        if note.is_file() and path.is_file() and path.stat().st_mtime <= note.stat().st_mtime + 1:
            continue
        if path.is_file() and (wrong := measure(path, entry)[1]):
            remedy = "move it away, or choose another folder"
            what = f"{path} is not an unmodified download"
            raise FetchError(what, *wrong, remedy, left="no file there was changed")


def _check_all(entries: Mapping[str, Entry], get: Callable[[str], tuple[Path, bool]]) -> Files:
    """Return (size, sha256) of each file; one is hashed while the next is downloaded."""
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:  # hashing frees the GIL
        checks = {}
        for name, entry in entries.items():
            path, ours = get(name)
            checks[name] = pool.submit(_check, path, entry, ours=ours)
        return {name: check.result() for name, check in checks.items()}


def _cached(repo: str, revision: str, to: Path | None, kind: Kind) -> Fetched:
    """Return a complete snapshot of the cache, checked: the cache calls a file by its hash."""
    from huggingface_hub import try_to_load_from_cache

    subject, remedy = f"{repo}, offline (HF_HUB_OFFLINE)", "fetch it once without HF_HUB_OFFLINE"
    if to is not None:
        raise FetchError(
            subject, f"a download to {to}", "no folder: offline, the cache is used", remedy
        )
    config = try_to_load_from_cache(repo, kind.config, _cache(), revision)
    if not isinstance(config, str):
        got = f"no {revision} of it in {_cache()}"
        raise FetchError(subject, got, "a complete snapshot", remedy)
    folder = Path(config).parent
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    weight_map = read_weight_map(repo, (folder / INDEX).read_bytes()) if INDEX in names else None
    entries = {}
    for name in kind.needed(repo, names, weight_map, remedy):
        blob = (folder / name).readlink().name if (folder / name).is_symlink() else ""
        sha256, git_id = (blob if len(blob) == digits else None for digits in (64, 40))
        entries[name] = Entry((folder / name).stat().st_size, sha256, git_id)
    files = _check_all(entries, lambda name: (folder / name, False))
    return Fetched(folder, repo, folder.name, files)


def find_cached(repo: str, listing: Listing) -> Path | None:
    """Return the cache's folder of a listed commit if it is complete, else None.

    Small files are hashed; of the weights only the sizes are compared, which suffices for headers.
    """
    folder, entries = _cache(repo) / "snapshots" / listing.commit, listing.entries

    def holds(name: str) -> bool:
        path, entry = folder / name, entries[name]
        if not path.is_file() or path.stat().st_size != entry.size:
            return False
        return name.endswith(WEIGHTS) or measure(path, entry)[1] is None

    if INDEX in entries and not holds(INDEX):
        return None
    weight_map = read_weight_map(repo, (folder / INDEX).read_bytes()) if INDEX in entries else None
    names = needed(repo, entries, weight_map, "see its page")
    return folder if all(holds(name) for name in names) else None


@dataclass(frozen=True, slots=True)
class _Download:
    """The download of one repository into the cache or a folder, at one commit."""

    hub: Hub
    to: Path | None
    listing: Listing
    kind: Kind

    def run(self) -> Fetched:
        """Download and check; then note in the cache which commit the branch was."""
        listed, commit, repo = self.listing.entries, self.listing.commit, self.hub.repo
        remedy = f"see {self.hub.page(commit)}"
        if self.to:  # before the index is fetched, which would replace one
            _refuse_foreign(self.to, {name: listed[name] for name in side_files(listed)})
        names = self.kind.needed(repo, listed, self._weight_map(), remedy)
        entries = {name: listed[name] for name in names}
        if self.to:
            _refuse_foreign(self.to, entries)
        self._refuse_full_disk(entries)
        files = _check_all(entries, self._get)
        if self.to is None:
            self._note_branch()
        return Fetched(self._folder(), repo, commit, files)

    def left(self) -> str:
        """Say what is on the disk after a failure."""
        place = self.to or _cache(self.hub.repo)
        if not place.exists():
            return NOTHING
        return f"finished files are kept in {place}; run the same command again to resume"

    def _weight_map(self) -> dict[str, str] | None:
        if INDEX not in self.listing.entries:
            return None
        path, ours = self._get(INDEX)
        _check(path, self.listing.entries[INDEX], ours=ours)
        return read_weight_map(self.hub.repo, path.read_bytes())

    def _get(self, name: str) -> tuple[Path, bool]:
        """Return the file's path, and whether this call put it there."""
        from huggingface_hub import hf_hub_download

        get = partial(hf_hub_download, self.hub.repo, name, revision=self.listing.commit)
        ask = partial(get, local_dir=self.to, cache_dir=_cache(), endpoint=self.hub.endpoint)
        before = self._stamp(name)
        path = Path(self.hub.tried(lambda: str(ask()), f"{self.hub.repo}: {name}"))
        if (commit := self._commit_of(name, path)) != self.listing.commit:
            what, expected = f"{self.hub.repo}: {name} is of another revision", self.listing.commit
            raise FetchError(what, f"commit {commit}", f"commit {expected}", "run again")
        return path, before is None or before != self._stamp(name)

    def _commit_of(self, name: str, path: Path) -> str:
        """Return the commit of a downloaded file, from the folder's note or the cache's path."""
        if self.to is None:
            return path.relative_to(_cache(self.hub.repo) / "snapshots").parts[0]
        note = _note(self.to, name)
        return note.read_text().partition("\n")[0] if note.is_file() else "unknown"

    def _folder(self) -> Path:
        return self.to or _cache(self.hub.repo) / "snapshots" / self.listing.commit

    def _stamp(self, name: str) -> tuple[int, int] | None:
        """Return a value that changes when the file is replaced; None if there is no file."""
        entry = self.listing.entries[name]
        blob = entry.sha256 or entry.git_id or "-"
        path = self.to / name if self.to else _cache(self.hub.repo) / "blobs" / blob
        return (path.stat().st_ino, path.stat().st_mtime_ns) if path.is_file() else None

    def _refuse_full_disk(self, entries: Mapping[str, Entry]) -> None:
        required = sum(e.size for name, e in entries.items() if self._stamp(name) is None)
        folder = (self.to or _cache()).absolute()
        free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
        if required > free:
            remedy = "free some space, or choose another folder (-o, HF_HOME)"
            raise SaveError(f"{folder} is too small", f"{free} bytes", f"{required} bytes", remedy)

    def _note_branch(self) -> None:
        """Write which commit the branch was into the cache, so that it is found offline."""
        if self.hub.revision == self.listing.commit:
            return
        ref = _cache(self.hub.repo) / "refs" / self.hub.revision
        part = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
        with suppress(OSError):  # a cache may be read-only
            ref.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(self.listing.commit)
            part.replace(ref)
