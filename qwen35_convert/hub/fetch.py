"""A checkpoint from the hub: only the files a conversion needs, at one commit, every byte checked.

    listing (sizes, hashes) -> each file at that commit -> checked against it

Source: huggingface_hub 2.4, `hf_hub_download`.
Trap: huggingface_hub compares no hash of a plain HTTP download and takes a cached file when the hub
does not answer, so every file is hashed here. It resumes a cut file, but not in the next run.
"""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from formats.errors import NOTHING
from qwen35_convert.errors import FetchError, SaveError
from qwen35_convert.hub.cache import OFFLINE, REMEDY, cache_folder, note_branch, snapshot
from qwen35_convert.hub.checked import check_file, check_files
from qwen35_convert.hub.client import Hub, Listing, check_name, is_offline, open_hub
from qwen35_convert.hub.files import (
    INDEX,
    MODEL,
    Entry,
    Kind,
    measure,
    read_weight_map,
    side_files,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


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
        return _offline(repo, revision or "main", to, kind)
    hub = open_hub(repo, revision, sleep)
    with nullcontext() if progress else disable_progress_bars("huggingface_hub"):
        download = _Download(hub, to, hub.listing(), kind)
        try:
            return download.run()
        except FetchError as error:
            error.left = error.left if error.left != NOTHING else download.left()
            raise


def _offline(repo: str, revision: str, to: Path | None, kind: Kind) -> Fetched:
    """Return a complete snapshot of the cache, checked."""
    if to is not None:
        got, expected = f"a download to {to}", "no folder: offline, the cache is used"
        raise FetchError(f"{repo}, {OFFLINE}", got, expected, REMEDY)
    folder, entries = snapshot(repo, revision, kind)
    files = check_files(entries, lambda name: (folder / name, False))
    return Fetched(folder, repo, folder.name, files)


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
        files = check_files(entries, self._get)
        if self.to is None:
            note_branch(repo, self.hub.revision, commit)
        return Fetched(self._folder(), repo, commit, files)

    def left(self) -> str:
        """Say what is on the disk after a failure."""
        place = self.to or cache_folder(self.hub.repo)
        if not place.exists():
            return NOTHING
        return f"finished files are kept in {place}; run the same command again to resume"

    def _weight_map(self) -> dict[str, str] | None:
        if INDEX not in self.listing.entries:
            return None
        path, ours = self._get(INDEX)
        check_file(path, self.listing.entries[INDEX], ours=ours)
        return read_weight_map(self.hub.repo, path.read_bytes())

    def _get(self, name: str) -> tuple[Path, bool]:
        """Return the file's path, and whether this call put it there."""
        from huggingface_hub import hf_hub_download

        get = partial(hf_hub_download, self.hub.repo, name, revision=self.listing.commit)
        ask = partial(get, local_dir=self.to, cache_dir=cache_folder(), endpoint=self.hub.endpoint)
        before = self._stamp(name)
        path = Path(self.hub.tried(lambda: str(ask()), f"{self.hub.repo}: {name}"))
        if (commit := self._commit_of(name, path)) != self.listing.commit:
            what, expected = f"{self.hub.repo}: {name} is of another revision", self.listing.commit
            raise FetchError(what, f"commit {commit}", f"commit {expected}", "run again")
        return path, before is None or before != self._stamp(name)

    def _commit_of(self, name: str, path: Path) -> str:
        """Return the commit of a downloaded file, from the folder's note or the cache's path."""
        if self.to is None:
            return path.relative_to(cache_folder(self.hub.repo) / "snapshots").parts[0]
        note = _note(self.to, name)
        return note.read_text().partition("\n")[0] if note.is_file() else "unknown"

    def _folder(self) -> Path:
        return self.to or cache_folder(self.hub.repo) / "snapshots" / self.listing.commit

    def _stamp(self, name: str) -> tuple[int, int] | None:
        """Return a value that changes when the file is replaced; None if there is no file."""
        entry = self.listing.entries[name]
        blob = entry.sha256 or entry.git_id or "-"
        path = self.to / name if self.to else cache_folder(self.hub.repo) / "blobs" / blob
        return (path.stat().st_ino, path.stat().st_mtime_ns) if path.is_file() else None

    def _refuse_full_disk(self, entries: Mapping[str, Entry]) -> None:
        required = sum(e.size for name, e in entries.items() if self._stamp(name) is None)
        folder = (self.to or cache_folder()).absolute()
        free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
        if required > free:
            remedy = "free some space, or choose another folder (-o, HF_HOME)"
            raise SaveError(f"{folder} is too small", f"{free} bytes", f"{required} bytes", remedy)
