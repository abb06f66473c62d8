"""Right artifacts of ours whose source, or which themselves, lie elsewhere since they were made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.planted.artifact import Artifact, Workshop, find_base
from tests.planted.edit import INDEX

Made = tuple[Path, Path]
Make = Callable[[Workshop, Path], Made]


def makers() -> Iterator[tuple[str, str, Make]]:
    """Yield kind, name and what makes the artifact: its receipt is beside it."""
    for name, (bases, move) in PLACES.items():
        for base in bases:
            yield "places", f"{name} {base}", partial(_move, base=base, move=move)


def _move(
    workshop: Workshop, folder: Path, base: str, move: Callable[[Artifact, Path], Made]
) -> Made:
    return move(workshop.place(find_base(base), folder), folder / "elsewhere")


def _source_moved(artifact: Artifact, elsewhere: Path) -> Made:
    """Name the source otherwise, by more letters than the padding of a header takes."""
    return artifact.path, Path(shutil.copytree(artifact.source, elsewhere / ("a-name-" * 20)))


def _source_documented(artifact: Artifact, elsewhere: Path) -> Made:
    path, source = _source_moved(artifact, elsewhere)
    (source / "README.md").write_text("# A model\n")
    (source / "LICENSE").write_text("Apache License 2.0\n")
    return path, source


def _source_in_other_files(artifact: Artifact, elsewhere: Path) -> Made:
    """Store the source's tensors in two files of other names."""
    path, source = _source_moved(artifact, elsewhere)
    files = sorted(source.glob("*.safetensors"))
    weights = {name: w for file in files for name, w in load_file(file).items()}
    for file in files:
        file.unlink()
    where = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(weights)}
    for file in set(where.values()):
        own = {name: w for name, w in weights.items() if where[name] == file}
        save_file(own, source / file, metadata={"format": "pt"})
    total = sum(w.nbytes for w in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (source / INDEX).write_text(json.dumps(index))
    return path, source


def _source_in_a_cache(artifact: Artifact, elsewhere: Path) -> Made:
    """Link the source's files to blobs, as the hub's cache does."""
    repository = elsewhere / "models--owner--name"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / "0123456789abcdef"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in artifact.source.iterdir():
        shutil.copy(path, blobs / f"blob-{path.name}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"blob-{path.name}")
    return artifact.path, snapshot


def _moved(artifact: Artifact, elsewhere: Path) -> Made:
    """Move the artifact; a folder gets another name, too."""
    home = artifact.folder if artifact.base.gguf else artifact.path
    files = (path for path in home.iterdir() if path != elsewhere)
    elsewhere.mkdir()
    for path in list(files):
        shutil.move(path, elsewhere / path.name)
    return (elsewhere / artifact.path.name if artifact.base.gguf else elsewhere), artifact.source


PLACES: dict[str, tuple[tuple[str, ...], Callable[[Artifact, Path], Made]]] = {
    "source moved": (("nano-fp8-block", "nano-q8_0", "wide-split"), _source_moved),
    "source documented": (("wide-fp8-channel", "moe-q8_0"), _source_documented),
    "source in other files": (("nano-fp8-block", "wide-q4_k_m"), _source_in_other_files),
    "source in a cache": (("nano-fp8-block", "nano-q8_0"), _source_in_a_cache),
    "moved": (("moe-fp8-block-hub", "wide-split", "nano-mmproj"), _moved),
}
