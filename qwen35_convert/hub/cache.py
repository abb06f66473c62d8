"""The hub's cache on this machine: where it is, and what of a repository it holds.

Trap: huggingface_hub reads HF_HOME when first imported; here, at each call.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35_convert.errors import FetchError
from qwen35_convert.hub.files import INDEX, WEIGHTS, Entry, Kind, measure, needed, read_weight_map

if TYPE_CHECKING:
    from qwen35_convert.hub.client import Listing

OFFLINE = "offline (HF_HUB_OFFLINE)"
REMEDY = "fetch it once without HF_HUB_OFFLINE"


def cache_folder(repo: str | None = None) -> Path:
    """Return the hub's cache, or the part of it that holds `repo`."""
    from huggingface_hub import constants

    env = os.environ.get
    default = Path(env("HF_HOME", ""), "hub") if env("HF_HOME") else constants.HF_HUB_CACHE
    cache = Path(env("HF_HUB_CACHE") or env("HUGGINGFACE_HUB_CACHE") or default).expanduser()
    return cache / f"models--{repo.replace('/', '--')}" if repo else cache


def snapshot(repo: str, revision: str, kind: Kind) -> tuple[Path, dict[str, Entry]]:
    """Return the folder of a complete snapshot and what its files should be, for use offline.

    The cache calls a file by its hash. FetchError if there is no such snapshot.
    """
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(repo, kind.config, cache_folder(), revision)
    if not isinstance(config, str):
        got = f"no {revision} of it in {cache_folder()}"
        raise FetchError(f"{repo}, {OFFLINE}", got, "a complete snapshot", REMEDY)
    folder = Path(config).parent
    names = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    weight_map = read_weight_map(repo, (folder / INDEX).read_bytes()) if INDEX in names else None
    entries = {}
    for name in kind.needed(repo, names, weight_map, REMEDY):
        blob = (folder / name).readlink().name if (folder / name).is_symlink() else ""
        sha256, git_id = (blob if len(blob) == digits else None for digits in (64, 40))
        entries[name] = Entry((folder / name).stat().st_size, sha256, git_id)
    return folder, entries


def find_cached(repo: str, listing: Listing) -> Path | None:
    """Return the cache's folder of a listed commit if it is complete, else None.

    Small files are hashed; of the weights only the sizes are compared, which suffices for headers.
    """
    folder, entries = cache_folder(repo) / "snapshots" / listing.commit, listing.entries

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


def note_branch(repo: str, branch: str, commit: str) -> None:
    """Write which commit a branch was into the cache, so that it is found offline."""
    if branch == commit:
        return
    ref = cache_folder(repo) / "refs" / branch
    part = ref.with_name(f"{ref.name}.{os.getpid()}.tmp")
    with suppress(OSError):  # a cache may be read-only
        ref.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(commit)
        part.replace(ref)
