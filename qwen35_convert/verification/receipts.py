"""The receipt of an artifact, read by whoever proves it: nothing in it is believed.

It names a recipe and a source, from which the artifact can be made again; hashes in it are compared
with the files, and can only add a failure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.json_file import read_object
from formats.safetensors.folder import DOCUMENTS
from formats.safetensors.index import MAX_NAME
from formats.safetensors.nested import is_nested
from qwen35_convert.containers.registry import container_of
from qwen35_convert.errors import RecipeError
from qwen35_convert.failure import Failure
from qwen35_convert.recipe.recipe import Recipe, build_recipe
from qwen35_convert.write.digests import Digests
from qwen35_convert.write.verdict import Verdict

WEIGHTS = (".safetensors", ".gguf")
# What a receipt says of its source in a word, if anything.
WORDS = ("title", "repo", "revision")
Entry = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What a receipt says.

    source, output  (size, SHA-256) of files by name; those of an adapter are among the source's
    adapter         whether one was merged
    title           the model's name, as the files say it; None: not told
    verdict         of the conversion's own verification, None if there was none
    errors          by scheme, as it measured them
    dropped         tensors that the recipe leaves out, by group
    calibration     what a text that calibrated came to, None if there was none
    """

    path: Path
    version: str
    recipe: Recipe
    source: Mapping[str, Entry]
    output: Mapping[str, Entry]
    title: str | None
    verdict: Verdict | None
    errors: Any
    dropped: Any
    calibration: Mapping[str, Any] | None = None
    adapter: bool = False

    def failure(self, problem: str) -> Failure:
        """Return what is wrong with the receipt."""
        return Failure(self.path.name, problem)

    def names(self, source: Checkpoint) -> bool:
        """Whether it is about this source: a file of weights has a name that it lists.

        If not, the model was given in another form: a folder's GGUF, other shards.
        """
        return not self.source.keys().isdisjoint(f.path.name for f in source.files.values())


def read_receipt(artifact: Checkpoint) -> Receipt | Failure | None:
    """Return the receipt, what is wrong with it, or None if there is none."""
    container = container_of(artifact)
    path = container.receipt_of(container.whole(artifact))
    if not path.is_file():
        return None
    try:
        return _parse(path)
    except (FormatError, RecipeError) as error:
        return Failure(path.name, f"is not a receipt: {error}")


def _parse(path: Path) -> Receipt:
    raw = read_object(path)
    recipe, version, verdict = (raw.get(key) for key in ("recipe", "qwen35", "verdict"))
    if not isinstance(recipe, dict) or not isinstance(version, str) or not version:
        raise FormatError("it names no recipe and version")
    if not isinstance(verdict, dict | None):
        raise FormatError("its verdict is not an object")
    source, output = (_entries(raw.get(side), side) for side in ("source", "output"))
    adapter = "adapter" in raw
    source |= _entries(raw["adapter"], "adapter") if adapter else {}
    title = raw["source"].get("title")
    for field in WORDS:
        if not isinstance(raw["source"].get(field), str | None):
            raise FormatError(f"the source's {field} is {raw['source'][field]!r:.120}")
    if not any(name.endswith(WEIGHTS) for name in source):
        raise FormatError("it lists no file of the source that has weights")
    calibration = raw.get("calibration")
    if not isinstance(calibration, dict | None):
        raise FormatError("its calibration is not an object")
    resolved = build_recipe(recipe)
    if resolved.quantize.calibrate is not None and calibration is None:
        raise FormatError("its recipe calibrates, and it says nothing of it")
    told = None if verdict is None else Verdict(verdict)
    says = title, told, raw.get("errors"), raw.get("dropped"), calibration
    return Receipt(path, version, resolved, source, output, *says, adapter)


def _entries(side: Any, what: str) -> dict[str, Entry]:
    files = side.get("files") if isinstance(side, dict) else None
    if not isinstance(files, dict) or not files:
        raise FormatError(f"it lists no {what} files")
    return {name: _entry(name, entry) for name, entry in files.items()}


def _entry(name: str, entry: Any) -> Entry:
    size, digest = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (0, 0)
    plain = (Path(name).name == name or is_nested(name)) and len(name) <= MAX_NAME
    if not plain or type(size) is not int or size < 0 or not isinstance(digest, str | None):
        raise FormatError(f"{name!r:.120} is not a file of this folder with its size and hash")
    return size, digest or ""


def check_adapter(receipt: Receipt | None, source: Checkpoint | None) -> None:
    """Refuse to hold an artifact that an adapter was merged into against its base model alone."""
    if receipt is not None and receipt.adapter and source is not None and source.overlay is None:
        raise RecipeError(
            receipt.path.name,
            "says that an adapter was merged",
            "both sources",
            "--against ADAPTER --base SOURCE",
        )


def output_places(receipt: Receipt, artifact: Checkpoint) -> dict[str, Path]:
    """Return the files that the receipt lists by name, but those that may be written anew."""
    return {n: artifact.folder / n for n in receipt.output if n not in DOCUMENTS}


def source_places(receipt: Receipt, source: Checkpoint) -> dict[str, Path]:
    """Return by name what was read for the artifact, far or near."""
    paths = {source.name_of(path): path for path in source.read_files()}
    return paths | {path.name: path for path in receipt.recipe.quantize.files}


def near_places(receipt: Receipt, source: Checkpoint) -> dict[str, Path]:
    """Return those files of the source that the receipt lists and that are on this machine."""
    paths = source_places(receipt, source)
    return {n: paths[n] for n in receipt.source if n in paths and not source.is_far(paths[n])}


def output_failures(receipt: Receipt, artifact: Checkpoint, digests: Digests) -> Iterator[Failure]:
    """Yield files that are not those which the receipt lists, and files that it does not list."""
    for name, problem in changed_files(receipt.output, output_places(receipt, artifact), digests):
        yield Failure(name, problem)
    container = container_of(artifact)
    for name in container.unlisted(artifact, {*receipt.output, receipt.path.name}):
        yield Failure(name, "lies beside the artifact, but is not in its receipt")


def source_failures(receipt: Receipt, source: Checkpoint, digests: Digests) -> Iterator[Failure]:
    """Yield files of the source that are not those from which the artifact was made."""
    for name in receipt.source.keys() - source_places(receipt, source).keys():
        yield Failure(name, "is in the receipt as a file of the source, which has none")
    for name, problem in changed_files(receipt.source, near_places(receipt, source), digests):
        yield Failure("SOURCE", f"was changed after the conversion: {name} {problem}")


def changed_files(
    listed: Mapping[str, Entry], places: Mapping[str, Path], digests: Digests
) -> Iterator[tuple[str, str]]:
    """Yield (name, problem) of each file that is not as listed; sizes first, then hashes.

    places  where the files are that are looked at; their names are listed
    """
    whole: dict[str, Path] = {}
    for name, path in places.items():
        size, digest = listed[name]
        if not path.is_file():
            yield name, "is in the receipt, but not there"
        elif path.stat().st_size != size:
            yield name, f"has {path.stat().st_size} bytes, the receipt says {size}"
        elif digest:
            whole[name] = path
    digests.begin(whole.values())
    for name, path in sorted(whole.items()):
        if digests.of(path) != listed[name][1]:
            yield name, "is not the file that the receipt describes (SHA-256 differs)"
