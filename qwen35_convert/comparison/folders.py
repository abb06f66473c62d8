"""Where a comparison works, and what stays of it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from qwen35_convert.durable import make_folders, writing


@dataclass(frozen=True, slots=True)
class Folders:
    """The folders of a comparison.

    work   what is removed afterwards; None: the current folder
    keep   the artifacts of the recipes, to stay there, verified as `convert` does; None: none stays
    cache  what the source computes, to stay there for later; None: it is removed
    """

    work: Path | None = None
    keep: Path | None = None
    cache: Path | None = None

    @contextmanager
    def opened(self) -> Iterator[Folders]:
        """Give the folders, made; what is not to stay is removed at the end. OutputError."""
        place = self.work or Path()
        with writing(place, "making a folder to work in", "nothing"):
            make_folders(place)
            work = Path(tempfile.mkdtemp(prefix=".qwen35-compare-", dir=place))
        try:
            yield Folders(work, self.keep, self.cache or work / "source")
        finally:
            shutil.rmtree(work, ignore_errors=True)

    @property
    def artifacts(self) -> Path:
        """Where the artifacts of recipes are written."""
        assert self.work is not None, "it is opened"
        return self.keep or self.work / "artifacts"


HERE = Folders()
