"""Sources: a folder, a file, or a repository on the hub, which is fetched or streamed.

to convert   fetched first, every byte checked; or streamed: only ranges, no copy on the disk
to inspect   headers only: from the cache's copy of the same commit if it is whole, else by ranges
"""

from __future__ import annotations

from pathlib import Path

from formats.checkpoint import Checkpoint
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.errors import FormatError, RecipeError
from qwen35_convert.hub.address import EXPECTED, is_address
from qwen35_convert.hub.client import is_here, is_offline, open_hub, parse_repo
from qwen35_convert.hub.fetch import fetch, find_cached
from qwen35_convert.hub.stream import open_stream
from qwen35_convert.write.receipt import Origin

DOWNLOAD = "download its files and give the folder"


def open_source(
    source: str | Path, *, progress: bool = False, stream: bool = False
) -> tuple[Checkpoint, Origin]:
    """Open a folder, a file, or `owner/name[@revision]` on the hub.

    stream  leave the weights on the hub: they are read by ranges when needed. Otherwise the
            repository is fetched first.
    """
    named = _named(source, stream=stream)
    if named is None:
        return open_checkpoint(Path(source)), Origin()
    if stream:
        streamed, commit = open_stream(*named)
        return streamed, Origin(named[0], commit)
    fetched = fetch(*named, progress=progress)
    hashes = {name: digest for name, (_, digest) in fetched.files.items()}
    return _open_copy(fetched.path, named[0]), Origin(fetched.repo, fetched.revision, hashes)


def open_headers(source: str | Path, *, stream: bool = False) -> Checkpoint:
    """Open a source to inspect it: from the hub only headers and side files are fetched.

    stream  do not use the cache
    """
    named = _named(source, stream=stream)
    if named is None or is_offline():
        return open_source(source, stream=stream)[0]
    repo, revision = named
    listing = open_hub(repo, revision).listing()
    folder = None if stream else find_cached(repo, listing)
    if folder is not None:
        return _open_copy(folder, repo)
    return open_stream(repo, revision, listing=listing)[0]


def _named(source: str | Path, *, stream: bool) -> tuple[str, str | None] | None:
    """Return (repo, revision) of a source on the hub, else None."""
    named = None if isinstance(source, Path) else parse_repo(source)
    if named is None and is_address(str(source)) and not is_here(str(source)):
        raise FormatError(str(source), "is no address of a model on the hub", EXPECTED, DOWNLOAD)
    if named is None and stream:
        raise RecipeError(f"--stream: {str(source)!r}", "is not a repository id", "owner/name")
    return named


def _open_copy(folder: Path, repo: str) -> Checkpoint:
    return open_checkpoint(folder, repo.rsplit("/", 1)[-1])
