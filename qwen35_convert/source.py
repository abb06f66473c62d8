"""Sources: a folder, a file, or a repository on the hub, which is fetched or streamed.

to convert   fetched first, every byte checked; or streamed: only ranges, no copy on the disk
to inspect   headers only: from the cache's copy of the same commit if it is whole, else by ranges
to merge     an adapter, whose few files are fetched, over a base model, which is any of the above
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from formats.adapter.changes import open_adapter
from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.missing import missing
from formats.safetensors.adapters import ADAPTER_CONFIG
from formats.side_names import TEMPLATE, TOKENIZER
from quant.low_rank import Merging
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.errors import RecipeError
from qwen35_convert.hub.address import EXPECTED, is_address
from qwen35_convert.hub.cache import find_cached
from qwen35_convert.hub.client import is_here, is_offline, open_hub, parse_repo
from qwen35_convert.hub.fetch import Fetched, fetch
from qwen35_convert.hub.files import ADAPTER
from qwen35_convert.hub.stream import open_stream
from qwen35_convert.write.receipt import Origin

TRAINED_WITH = (TEMPLATE, TOKENIZER)
NO_BASE = "leave --base out to convert a whole model"
DOWNLOAD = "download its files and give the folder"


@dataclass(frozen=True, slots=True)
class Merge:
    """A source that is two: an adapter (LoRA), and the model that it is merged into.

    Each is what a source is: a folder, a file (of the model), or `owner/name[@revision]`.
    """

    adapter: str | Path
    base: str | Path

    def __str__(self) -> str:
        return str(self.adapter)


Source = str | Path | Merge


def open_source(
    source: Source, *, progress: bool = False, stream: bool = False
) -> tuple[Checkpoint, Origin]:
    """Open a folder, a file, or `owner/name[@revision]` on the hub; or an adapter and its model.

    stream  leave the weights on the hub: they are read by ranges when needed. Otherwise the
            repository is fetched first.
    """
    if isinstance(source, Merge):
        opened, origin = open_source(source.base, progress=progress, stream=stream)
        adapter = _fetch_adapter(source.adapter, progress=progress)
        return merge(opened, *adapter[:2]), replace(origin, adapter=adapter[2])
    named = _named(source, stream=stream)
    if named is None:
        return open_checkpoint(Path(source)), Origin()
    if stream:
        streamed, commit = open_stream(*named)
        return streamed, Origin(named[0], commit)
    fetched = fetch(*named, progress=progress)
    return _open_copy(fetched.path, named[0]), _origin(fetched)


def merge(base: Checkpoint, folder: Path, name: str) -> Checkpoint:
    """Return a model with the adapter in `folder` merged as it is read; `name` is the result's."""
    adapter = open_adapter(folder, base)
    changed = "1 tensor" if len(adapter.changes) == 1 else f"{len(adapter.changes)} tensors"
    note = f"{folder.name}: an adapter (LoRA) is merged into {changed}"
    trained = adapter.config.base
    note += f"; it was trained on {trained}" if trained else ""
    notes = (*base.notes, note, *_unused(base, folder))
    return replace(base, name=name, overlay=Merging(adapter), notes=notes)


def _unused(base: Checkpoint, folder: Path) -> Iterator[str]:
    """Yield that a file beside an adapter, which trainers save there, is not the model's."""
    for name in TRAINED_WITH:
        path = folder / name
        if path.is_file() and path.read_bytes() != base.side(name):
            yield f"{path.parent.name}/{name} is not used: the base model's is kept, which differs"


def _fetch_adapter(source: str | Path, *, progress: bool) -> tuple[Path, str, Origin]:
    """Return an adapter's folder, what people call it, and where it is from."""
    named = _named(source, stream=False)
    if named is not None:
        fetched = fetch(*named, kind=ADAPTER, progress=progress)
        return fetched.path, named[0].rpartition("/")[2], _origin(fetched)
    folder = Path(source)
    if not (folder / ADAPTER_CONFIG).is_file():
        got = "has no adapter_config.json" if folder.is_dir() else "is not a folder"
        raise FormatError(str(source), got, "an adapter (LoRA), which --base is for", NO_BASE)
    return folder, folder.resolve().name, Origin()


def _origin(fetched: Fetched) -> Origin:
    hashes = {name: digest for name, (_, digest) in fetched.files.items()}
    return Origin(fetched.repo, fetched.revision, hashes)


def open_headers(source: Source, *, stream: bool = False) -> Checkpoint:
    """Open a source to inspect it: from the hub only headers and side files are fetched.

    Of an adapter all is fetched.

    stream  do not use the cache
    """
    if isinstance(source, Merge):
        adapter = _fetch_adapter(source.adapter, progress=False)
        return merge(open_headers(source.base, stream=stream), *adapter[:2])
    named = _named(source, stream=stream)
    if named is None or is_offline():
        return open_source(source, stream=stream)[0]
    repo, revision = named
    listing = open_hub(repo, revision).listing()
    folder = None if stream else find_cached(repo, listing)
    if folder is not None:
        return _open_copy(folder, repo)
    return open_stream(repo, revision, listing=listing)[0]


def path_of(source: Source, opened: Checkpoint, origin: Origin) -> Path:
    """Return what a source was opened from."""
    model = source.base if isinstance(source, Merge) else source
    return opened.folder if origin.repo else Path(model)


def path_here(artifact: str | Path) -> Path:
    """Return the path of an artifact. FormatError if nothing is there: names on the hub are not."""
    path = Path(artifact)
    if os.path.lexists(path):
        return path
    named = parse_repo(str(artifact))
    hub = f"; if it is on the hub: qwen35 download {named[0]} -o DIR, and give DIR" if named else ""
    raise missing(path, "a folder or a file here", hub)


def repository_of(source: Source) -> tuple[str, str | None] | None:
    """Return (owner/name, revision) of a source that is a whole model on the hub, else None."""
    return None if isinstance(source, Merge) else _named(source, stream=False)


def _named(source: str | Path, *, stream: bool) -> tuple[str, str | None] | None:
    """Return (repo, revision) of a source on the hub, else None."""
    named = None if isinstance(source, Path) else parse_repo(source)
    if named is None and is_address(str(source)) and not is_here(str(source)):
        raise FormatError(str(source), "is no address of a model on the hub", EXPECTED, DOWNLOAD)
    if named is None and (bare := str(source).rstrip("/")) != str(source) and not is_here(bare):
        _refuse_slash(str(source), bare)
    if named is None and stream:
        raise RecipeError(f"--stream: {str(source)!r}", "is not a repository id", "owner/name")
    return named


def _refuse_slash(source: str, bare: str) -> None:
    """Refuse the name of a repository that ends in a slash, as a folder's may. FormatError."""
    if parse_repo(bare):
        hub = f", or {bare} without the slash at its end for the repository on the hub"
        raise missing(Path(bare), "a folder", hub)


def _open_copy(folder: Path, repo: str) -> Checkpoint:
    return open_checkpoint(folder, repo.rsplit("/", 1)[-1])
