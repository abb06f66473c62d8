"""What a container is: one kind of artifact, and all that is known of it.

`expected` says what an artifact will be, before a weight is read; a sink writes it; `open` reads it
again, `census` judges its headers, `same` and `beside` compare it with its source. Everybody who
meets an artifact asks its container; `qwen35_convert.containers.registry` lists them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from formats.checkpoint import Checkpoint, TensorFile
    from quant.stored import Value
    from qwen35_convert.failure import Failure
    from qwen35_convert.planning.plan import Plan
    from qwen35_convert.recipe.recipe import Recipe
    from qwen35_convert.write.sink import FolderSink


class Container(Protocol):
    """One kind of artifact."""

    @property
    def name(self) -> str:
        """What recipes call it (`export.format`)."""
        ...

    @property
    def out(self) -> str:
        """What OUT must be, in words."""
        ...

    @property
    def ending(self) -> str:
        """What the name of an OUT of this kind ends in; empty: anything."""
        ...

    def default_recipe(self, *, again: bool) -> str:
        """Return the bundled recipe of an OUT of this kind, if none is named.

        again  the source is quantised
        """
        ...

    @property
    def widens(self) -> bool:
        """Whether it stores what is kept in wider types than the source had."""
        ...

    @property
    def carded(self) -> bool:
        """Whether a card lies inside it."""
        ...

    @property
    def loaders(self) -> Collection[str]:
        """The peers of `bench` that load it."""
        ...

    def takes(self, path: Path) -> bool:
        """Whether a path of this name is, or is to be, an artifact of this kind."""
        ...

    def open(self, path: Path, name: str = "") -> Checkpoint:
        """Open it by its headers.

        name  what people call the model, where the path does not say

        FormatError if anything about the files themselves is wrong; what is wrong with the tensors
        is in `layout.problems`.
        """
        ...

    def expected(self, source: Checkpoint, recipe: Recipe, stem: str, *, widened: bool) -> Plan:
        """Return the whole artifact, before a weight is read; `stem` is OUT's name without ending.

        widened  the source's container has what it keeps in a wider type than the model's

        RecipeError for what the recipe may not ask, FormatError for what cannot be stored so.
        """
        ...

    def check_verifiable(self, plan: Plan) -> None:
        """Raise RecipeError if what this plan writes cannot be opened again."""
        ...

    def check_out(self, out: Path, source: Checkpoint, *, overwrite: bool) -> None:
        """Raise OutputError before planning, if OUT must not be written."""
        ...

    def check_files(self, out: Path, plan: Plan, source: Checkpoint, *, overwrite: bool) -> None:
        """Raise OutputError after planning, if one of the planned files must not be written."""
        ...

    def finish(self, out: Path, plan: Plan, digest: str) -> bool:
        """Finish what a crash interrupted while OUT got its name; True if it was this conversion.

        digest  what ties a journal to this conversion
        """
        ...

    def open_sink(self, out: Path, plan: Plan) -> FolderSink:
        """Return what writes the plan's files aside, and gives them their names at last."""
        ...

    def receipt_of(self, artifact: Path) -> Path:
        """Return where the receipt of an artifact at this path is, or is to be."""
        ...

    def whole(self, artifact: Checkpoint) -> Path:
        """Return the path by which an opened artifact is known: its OUT."""
        ...

    def census(self, artifact: Checkpoint) -> Iterator[Failure]:
        """Yield everything that headers and config show to be wrong."""
        ...

    def weighed(self, artifact: Checkpoint) -> bool:
        """Whether the artifact says that an importance matrix was used."""
        ...

    def same(self, ours: Value, theirs: Value, rows: tuple[int, int], *, widened: bool) -> bool:
        """Whether rows that are kept here are the source's, as near as this container keeps them.

        widened  the source's container has them in a wider type than the model's
        """
        ...

    def files_of(self, artifact: Checkpoint) -> Mapping[str, TensorFile]:
        """Return every file of tensors, also those that are not opened with the checkpoint."""
        ...

    def unlisted(self, artifact: Checkpoint, listed: Collection[str]) -> Iterator[str]:
        """Yield the names of files that belong to it by their place, and are not listed."""
        ...

    def header_differences(self, path: Path, expected: bytes) -> Iterator[str]:
        """Yield how the header of a file of tensors differs from the expected one.

        It is asked only where they are not equal.
        """
        ...

    def config_differences(self, artifact: Checkpoint, source: Checkpoint) -> Iterator[Failure]:
        """Yield fields that engines obey and that are not the source's, whatever the recipe was."""
        ...

    def beside(self, artifact: Checkpoint, source: Checkpoint | None) -> Iterator[Failure]:
        """Yield what the headers of files beside those of its tensors show to be wrong."""
        ...

    def values_beside(self, artifact: Checkpoint, source: Checkpoint | None) -> Iterator[Failure]:
        """Yield what is wrong with the values in those files."""
        ...
