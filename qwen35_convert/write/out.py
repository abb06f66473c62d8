"""OUT: where it is built, and which OUT is refused, because writing it would destroy something."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from qwen35_convert.durable import nearest_folder
from qwen35_convert.errors import OutputError

PARTIAL_SUFFIX = ".qwen35-partial"


def partial_of(out: Path) -> Path:
    """Return the folder where OUT is built."""
    return out.with_name(f".{out.name}{PARTIAL_SUFFIX}")


def check_out(out: Path, sources: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse an OUT that would destroy something: a source, or unrelated files."""
    check_name(out)
    for source in sources:
        place, origin = out.resolve(), source.resolve()
        if place == origin or origin in place.parents or place in origin.parents:
            raise OutputError(
                f"{out} and the source {source} contain each other", fix="choose an OUT elsewhere"
            )
    check_link(out)
    check_parent(out)
    if not out.exists():
        return
    if not out.is_dir():
        raise OutputError(str(out), "is a file", "a folder, or a name that is free")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise OutputError(
            f"{out} exists and is not empty", fix="choose another OUT, or add --overwrite"
        )
    if not (out / "config.json").is_file() and not any(out.glob("*.safetensors")):
        raise OutputError(
            f"{out} does not hold a model, so --overwrite does not replace it",
            fix="choose another OUT",
        )


def check_name(out: Path) -> None:
    """Refuse an OUT that the system takes for no name."""
    if not out.name:
        raise OutputError(str(out), "has no name of its own", "the name of a folder or file")
    try:
        for name in (out, partial_of(out)):
            with suppress(FileNotFoundError, NotADirectoryError):
                name.lstat()
        out.resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise OutputError(f"{out!s:.80}", f"cannot be written: {error}") from None


def check_link(out: Path) -> None:
    """Refuse an OUT that is a link: it would be replaced, not what it leads to."""
    if out.is_symlink():
        fix = "name that place itself, or remove the link"
        raise OutputError(str(out), f"is a link to {out.readlink()}", fix=fix)


def check_parent(out: Path) -> None:
    """Refuse an OUT that would be inside a file; folders that are missing are made later."""
    nearest = nearest_folder(out)
    if not nearest.is_dir():
        raise OutputError(str(nearest), "is a file", "the folder that OUT goes into")
