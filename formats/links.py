"""Links in a folder of weights, and the hub's cache, whose snapshots are made of them.

models--owner--name/blobs/SHA-256
models--owner--name/snapshots/COMMIT/model.safetensors -> ../../blobs/SHA-256
models--owner--name/refs/main: COMMIT
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from formats.errors import FormatError

MODELS, SNAPSHOTS, BLOBS = "models--", "snapshots", "blobs"


def check_links(folder: Path, names: Iterable[str]) -> None:
    """Refuse links out of the folder: what they show would be read here and published elsewhere.

    The hub's cache is made of links to its blobs.
    """
    home = folder.resolve()
    for name in sorted(names):
        path = folder / name
        check_leads(path)
        if not path.is_file():
            continue
        real = path.resolve()
        if home not in real.parents and not _is_blob(real, home):
            raise FormatError(
                f"{name} is a link to {real}, expected a file of {folder}\n"
                "  fix   copy the file here, or name the folder that it is in"
            )


def check_leads(path: Path) -> None:
    """Refuse a link to nothing. FormatError names the repository, where the hub's cache has it."""
    try:
        if not path.is_symlink() or path.exists():
            return
    except OSError as error:
        raise FormatError(f"{path.name:.80}", f"cannot be a file: {error.strerror}") from None
    hub = repository_of(path.parent)
    again = f"fetch it again: hf download {hub[0]} {path.name} --revision {hub[1]}" if hub else ""
    raise FormatError(
        path.name,
        f"is a link to {path.readlink()}, which does not exist",
        "a file" + (": its download was not finished, or the cache was emptied" if hub else ""),
        again or "copy the file here",
    )


def is_folder(path: Path) -> bool:
    """Whether a folder is there; False where the system takes no such name."""
    try:
        return path.is_dir()
    except OSError:
        return False


def _is_blob(real: Path, home: Path) -> bool:
    """Whether this is a file of a hub cache: of any, or of the one that `home` is a snapshot of."""
    if real.parent.name != BLOBS:
        return False
    repo = real.parents[1]
    return repo.name.startswith(MODELS) or repo / SNAPSHOTS in home.parents


def repository_of(folder: Path) -> tuple[str, str] | None:
    """Return (owner/name, commit) of a snapshot in the hub's cache, None for another folder."""
    real = folder.resolve()
    if real.parent.name != SNAPSHOTS or not real.parents[1].name.startswith(MODELS):
        return None
    return real.parents[1].name.removeprefix(MODELS).replace("--", "/"), real.name


def snapshot_in(folder: Path) -> Path:
    """Return the snapshot in a repository's folder of the hub's cache; another folder as it is.

    FormatError if it has several, and no branch main says which.
    """
    if not folder.name.startswith(MODELS) or not (folder / SNAPSHOTS).is_dir():
        return folder
    main = folder / "refs" / "main"
    names = sorted(path.name for path in (folder / SNAPSHOTS).iterdir() if path.is_dir())
    commit = main.read_text().strip() if main.is_file() else ""
    if commit in names or len(names) == 1:
        return folder / SNAPSHOTS / (commit if commit in names else names[0])
    raise FormatError(
        str(folder),
        f"has {len(names)} snapshots",
        "one, or a branch main that names one",
        f"give one of them: {folder / SNAPSHOTS / names[0]}" if names else "download it again",
    )
