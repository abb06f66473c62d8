"""A GGUF file, whole or split, with its vision file and receipt beside it, as a container."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from formats.family.roles import ROLES
from formats.gguf.checkpoint import CONTAINER, SUFFIX, first_file, open_gguf, whole_path
from formats.gguf.file import GgufFile, begins_as_gguf
from formats.gguf.split import SHARD
from formats.links import is_folder
from quant.registry import GGUF_RECOGNISERS
from qwen35_convert.errors import OutputError, RecipeError
from qwen35_convert.write.file_sink import FileSink, check_out_files, finish_moves
from qwen35_convert.write.out import check_name
from qwen35_convert.write.receipt import receipt_name
from qwen35_convert.write.sink import FolderSink

if TYPE_CHECKING:
    from formats.checkpoint import Checkpoint, TensorFile
    from quant.stored import Value
    from qwen35_convert.failure import Failure
    from qwen35_convert.planning.plan import Plan
    from qwen35_convert.recipe.recipe import Recipe

VOCABULARY = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class GgufFiles:
    """One file, or the parts of a split one; metadata instead of config.json and side files."""

    name: str = CONTAINER
    out: str = "a name that ends in .gguf and is not a folder"
    ending: str = SUFFIX
    widens: bool = True
    carded: bool = False
    loaders: tuple[str, ...] = ()

    def default_recipe(self, *, again: bool) -> str:
        """Return Q8_0, whatever the source is."""
        del again
        return "gguf-q8_0"

    def takes(self, path: Path) -> bool:
        """Take names that end in .gguf, and files of another name that begin as GGUF does."""
        return begins_as_gguf(path) or (path.suffix.lower() == SUFFIX and not is_folder(path))

    def open(self, path: Path, _name: str = "") -> Checkpoint:
        """Open a file, or all files of a split one from any of them."""
        return open_gguf(path, GGUF_RECOGNISERS)

    def expected(self, source: Checkpoint, recipe: Recipe, stem: str, *, widened: bool) -> Plan:
        """Plan `stem`.gguf, or its parts, and mmproj-`stem`.gguf if vision is kept."""
        from qwen35_convert.containers.gguf.expected import make_gguf_plan

        del widened  # it has types of its own in any case
        return make_gguf_plan(source, recipe, stem)

    def check_verifiable(self, plan: Plan) -> None:
        """Refuse a slice without the embedding, from which the vocabulary's size is known."""
        if plan.recipe.only and VOCABULARY not in plan.tensors:
            raise RecipeError(
                f"only is {plan.recipe.only!r}: a GGUF file without {VOCABULARY} cannot be "
                "opened again to verify it\n  fix   add --no-verify"
            )

    def check_out(self, out: Path, _source: Checkpoint, *, overwrite: bool) -> None:
        """Refuse a GGUF file of another name; else, which files OUT is, the plan says."""
        del overwrite
        check_name(out)
        if out.suffix != SUFFIX:
            raise OutputError(str(out), "is a GGUF file", self.out, "choose another OUT")

    def check_files(self, out: Path, plan: Plan, source: Checkpoint, *, overwrite: bool) -> None:
        """Refuse files that would replace something else, or the source."""
        names = [shard.name for shard in plan.shards]
        check_out_files(out, names, source.read_files(), overwrite=overwrite)

    def finish(self, out: Path, plan: Plan, digest: str) -> bool:
        """Finish moving the files to their names."""
        return finish_moves(out, out.with_name(plan.shards[0].name), digest)

    def open_sink(self, out: Path, plan: Plan) -> FolderSink:
        """Return the files under construction."""
        return FileSink(out, plan.shards)

    def receipt_of(self, artifact: Path) -> Path:
        """Return the file beside OUT."""
        return artifact.with_name(receipt_name(artifact))

    def whole(self, artifact: Checkpoint) -> Path:
        """Return where the model would be if it were not split."""
        return whole_path(artifact)

    def census(self, artifact: Checkpoint) -> Iterator[Failure]:
        """Judge what llama.cpp would refuse, or read wrongly."""
        from qwen35_convert.containers.gguf.census import gguf_failures
        from qwen35_convert.containers.gguf.metadata_check import own_differences

        yield from gguf_failures(artifact)
        yield from own_differences(artifact)

    def weighed(self, artifact: Checkpoint) -> bool:
        """Whether the metadata name an importance matrix, or a text."""
        from quant.ggml_types import METHOD
        from qwen35_convert.containers.gguf.importance import USED

        return not {USED, METHOD}.isdisjoint(first_file(artifact).kv)

    def same(self, ours: Value, theirs: Value, rows: tuple[int, int], *, widened: bool) -> bool:
        """Whether the file holds what its transforms make of the source's rows, rounded once.

        What a GGUF source has rounded itself may differ by that.
        """
        from quant.measure import within
        from qwen35_convert.containers.gguf.kept import holds

        if holds(ours, theirs, rows):
            return True
        slack = ROLES[ours.atom.role].gguf_slack if widened else None
        return slack is not None and within(ours.rows(*rows), theirs.rows(*rows), slack)

    def files_of(self, artifact: Checkpoint) -> Mapping[str, TensorFile]:
        """Return the parts, and the vision file if there is one."""
        from qwen35_convert.containers.gguf.mmproj_check import mmproj_beside

        vision = mmproj_beside(artifact)
        return {**artifact.files, **({vision.name: GgufFile(vision)} if vision else {})}

    def unlisted(self, artifact: Checkpoint, listed: Collection[str]) -> Iterator[str]:
        """Yield files of the same stem: parts of another split, a vision file."""
        stem = self.whole(artifact).stem
        for path in sorted(artifact.folder.glob("*.gguf")):
            part = SHARD.fullmatch(path.name)
            own = part[1] if part else path.stem.removeprefix("mmproj-")
            if own == stem and path.name not in listed:
                yield path.name

    def header_differences(self, path: Path, expected: bytes) -> Iterator[str]:
        """Compare keys and values, tensors, their types, shapes and places."""
        from qwen35_convert.containers.gguf.differences import header_differences

        yield from header_differences(path, expected)

    def config_differences(self, artifact: Checkpoint, source: Checkpoint) -> Iterator[Failure]:
        """Compare the metadata with those that the source's config and tokenizer give."""
        from qwen35_convert.containers.gguf.metadata_check import config_differences

        yield from config_differences(artifact, source)

    def beside(self, artifact: Checkpoint, source: Checkpoint | None) -> Iterator[Failure]:
        """Judge the header of the vision file, if there is one.

        Without a source the file type and the tokenizer, too, which are compared with one.
        """
        from qwen35_convert.containers.gguf.file_type import file_type_failures
        from qwen35_convert.containers.gguf.mmproj_check import mmproj_beside, mmproj_failures
        from qwen35_convert.containers.gguf.own_tokenizer import tokenizer_failures

        vision = mmproj_beside(artifact)
        if vision is not None:
            yield from mmproj_failures(vision, artifact, source)
        if source is None:
            yield from file_type_failures(artifact)
            yield from tokenizer_failures(artifact)

    def values_beside(self, artifact: Checkpoint, source: Checkpoint | None) -> Iterator[Failure]:
        """Judge the vision file's values."""
        from qwen35_convert.containers.gguf.mmproj_check import mmproj_beside
        from qwen35_convert.containers.gguf.mmproj_values import value_failures

        vision = mmproj_beside(artifact)
        if vision is not None:
            yield from value_failures(vision, source)
