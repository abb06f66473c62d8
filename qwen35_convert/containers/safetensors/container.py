"""A folder of safetensors, as a container."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from formats.family.roles import ROLES
from formats.safetensors.folder import CONTAINER, open_folder
from quant.registry import RECOGNISERS
from qwen35_convert.write.out import check_out
from qwen35_convert.write.receipt import RECEIPT
from qwen35_convert.write.sink import FolderSink

if TYPE_CHECKING:
    from torch import Tensor

    from formats.checkpoint import Checkpoint, TensorFile
    from quant.stored import Value
    from qwen35_convert.failure import Failure
    from qwen35_convert.planning.plan import Plan
    from qwen35_convert.recipe.recipe import Recipe


def _is_wide(rows: Tensor) -> bool:
    """Whether rows are of the type that holds all numbers of the others."""
    import torch

    return rows.dtype == torch.float32


@dataclass(frozen=True, slots=True)
class SafetensorsFolder:
    """config.json, shards, index, and the source's side files."""

    name: str = CONTAINER
    out: str = "a folder"
    ending: str = ""
    widens: bool = False
    carded: bool = True
    loaders: tuple[str, ...] = ("transformers", "fla", "vllm")

    def default_recipe(self, *, again: bool) -> str:
        """Return FP8 blocks; weights are never quantised a second time unless that is asked for."""
        return "bf16-split" if again else "fp8-block"

    def takes(self, _path: Path) -> bool:
        """Take any path that no other container takes."""
        return True

    def open(self, path: Path, name: str = "") -> Checkpoint:
        """Open a folder, or one .safetensors file beside its config.json."""
        return open_folder(path, RECOGNISERS, name)

    def expected(self, source: Checkpoint, recipe: Recipe, _stem: str, *, widened: bool) -> Plan:
        """Plan a folder."""
        from qwen35_convert.containers.safetensors.expected import make_folder_plan

        return make_folder_plan(source, recipe, widened=widened)

    def check_verifiable(self, _plan: Plan) -> None:
        """Let every plan pass: any slice can be opened again."""

    def check_out(self, out: Path, source: Checkpoint, *, overwrite: bool) -> None:
        """Refuse a folder that holds something else, or the source."""
        check_out(out, source.places, overwrite=overwrite)

    def check_files(self, _out: Path, _plan: Plan, _source: Checkpoint, *, overwrite: bool) -> None:
        """Let every plan pass: all its files are in the folder that was checked."""

    def finish(self, _out: Path, _plan: Plan, _digest: str) -> bool:
        """Return False: a folder gets its name in one step."""
        return False

    def open_sink(self, out: Path, plan: Plan) -> FolderSink:
        """Return the folder under construction."""
        return FolderSink(out, plan.shards)

    def receipt_of(self, artifact: Path) -> Path:
        """Return the file inside the folder."""
        return artifact / RECEIPT

    def whole(self, artifact: Checkpoint) -> Path:
        """Return the folder."""
        return artifact.folder

    def census(self, artifact: Checkpoint) -> Iterator[Failure]:
        """Judge headers, config.json, the index, and the list of unquantised modules."""
        from qwen35_convert.containers.safetensors.census import structure_failures

        yield from structure_failures(artifact)

    def weighed(self, _artifact: Checkpoint) -> bool:
        """Return False: no scheme of a folder uses an importance matrix."""
        return False

    def same(self, ours: Value, theirs: Value, rows: tuple[int, int], *, widened: bool) -> bool:
        """Whether rows are equal bit for bit, after the cast if either side's are wider.

        What a wider container rounds on the way there and back may differ by that.
        """
        from quant.measure import same_bits, within

        left, right = ours.rows(*rows), theirs.rows(*rows)
        if same_bits(left, right.to(left.dtype) if widened or _is_wide(left) else right):
            return True
        if _is_wide(left) and same_bits(left, theirs.exact(*rows).float()):
            return True
        slack = ROLES[ours.atom.role].gguf_slack if widened else None
        return slack is not None and within(left, right, slack)

    def files_of(self, artifact: Checkpoint) -> Mapping[str, TensorFile]:
        """Return the shards."""
        return artifact.files

    def unlisted(self, artifact: Checkpoint, listed: Collection[str]) -> Iterator[str]:
        """Yield every other file that an engine obeys: the rest is its owner's."""
        from qwen35_convert.containers.safetensors.sides.differences import JUDGES
        from qwen35_convert.containers.safetensors.sides.engine_files import (
            OTHERS,
            WEIGHTS,
            engine_files,
        )

        names = engine_files(artifact.folder, (*WEIGHTS, *JUDGES, *OTHERS))
        yield from (name for name in names if name not in listed)

    def header_differences(self, path: Path, expected: bytes) -> Iterator[str]:
        """Compare tensors, their types, shapes and places, and the metadata."""
        from qwen35_convert.containers.safetensors.differences import header_differences

        yield from header_differences(path, expected)

    def config_differences(self, artifact: Checkpoint, source: Checkpoint) -> Iterator[Failure]:
        """Compare config.json and the side files with the source's."""
        from qwen35_convert.containers.safetensors.differences import config_differences
        from qwen35_convert.containers.safetensors.sides.differences import side_differences

        yield from config_differences(artifact, source)
        yield from side_differences(artifact, source)

    def beside(self, artifact: Checkpoint, source: Checkpoint | None) -> Iterator[Failure]:
        """Name a side file that engines do not load; with a source each is compared with its."""
        from qwen35_convert.containers.safetensors.unloadable import unloadable

        yield from unloadable(artifact) if source is None else ()

    def values_beside(self, _artifact: Checkpoint, _source: Checkpoint | None) -> Iterator[Failure]:
        """Yield nothing."""
        yield from ()
