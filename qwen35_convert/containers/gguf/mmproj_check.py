"""The vision file beside a GGUF that no recipe is known of: its keys, its tensors, their values.

Against a source that has a tower, the keys must say what its config and preprocessor say, and each
tensor must be the source's: bit for bit after the cast, in blocks within what their type allows.
Without one the file is held against itself, and against the width of the text model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.family.config import Config
from formats.family.ops import Shape
from formats.family.roles import VISION
from formats.gguf.checkpoint import ORIGIN, whole_path
from formats.gguf.file import GgufFile
from formats.gguf.header import Kv
from formats.gguf.obeyed import ABSENT_IN_MMPROJ, SAMPLING
from formats.gguf.tower import SIZE_KEYS, tower_sizes, tower_tensors
from formats.gguf.vision import VisionTensor, mmproj_metadata, read_preprocessor
from formats.tensor import TensorInfo
from quant.ggml import kinds
from quant.mix.identify import MAIN_TYPES
from qwen35_convert.containers.gguf.file_type import KEY as FILE_TYPE
from qwen35_convert.containers.gguf.file_type import stated_type
from qwen35_convert.containers.gguf.keys import Reading, key_differences
from qwen35_convert.containers.gguf.mmproj import mmproj_name
from qwen35_convert.difference import first
from qwen35_convert.failure import Failure

MOST = 20
MEAN, STD = "clip.vision.image_mean", "clip.vision.image_std"
PROJECTOR, PROJECTOR_OF_IMAGES = "clip.projector_type", "clip.vision.projector_type"
DEEPSTACK = "clip.vision.is_deepstack_layers"
EPSILON = "clip.vision.attention.layer_norm_epsilon"
# key: where a preprocessor says how large images may be
PIXELS = {
    "clip.vision.image_min_pixels": ("min_pixels", "shortest_edge"),
    "clip.vision.image_max_pixels": ("max_pixels", "longest_edge"),
}


def mmproj_beside(artifact: Checkpoint) -> Path | None:
    """Return the vision file that lies beside a GGUF artifact, if there is one."""
    path = artifact.folder / mmproj_name(whole_path(artifact).stem)
    return path if path.is_file() else None


def has_tower(source: Checkpoint | None) -> bool:
    """Whether there is a source, and it has a vision tower."""
    return source is not None and any(a.role == VISION for a in source.layout.atoms.values())


def mmproj_failures(
    path: Path, artifact: Checkpoint, source: Checkpoint | None
) -> Iterator[Failure]:
    """Yield what the header of a vision file shows to be wrong."""
    try:
        file = GgufFile(path)
        kv = _read(file)
        tower = source if source is not None and has_tower(source) else None
        config = tower.config if tower else _own_config(artifact, kv)
        yield from _keys(file, kv, config, tower)
    except FormatError as error:
        yield Failure(path.name, str(error).removeprefix(f"{path.name}: "))
        return
    wanted = tower_tensors(config.sizes)
    yield from _tensors(file.infos, wanted)
    yield from _file_type(file, wanted)


def _read(file: GgufFile) -> dict[str, Kv]:
    """Return the pairs that are read of a vision file; the projector has two keys."""
    kv = {key: file.kv[key] for key in file.kv if not key.startswith(SAMPLING)}
    spare = kv.pop(PROJECTOR_OF_IMAGES, None)
    return {PROJECTOR: Kv(PROJECTOR, spare.kind, spare.value), **kv} if spare else kv


def _own_config(artifact: Checkpoint, kv: Mapping[str, Kv]) -> Config:
    """Return the text model's config with the tower that the file says it has."""
    text, fields = artifact.config, artifact.config.fields | SIZE_KEYS
    sizes = text.sizes | tower_sizes(kv)
    return replace(text, vision={}, sizes=sizes, fields=fields, origin=ORIGIN)


def _keys(
    file: GgufFile, kv: Mapping[str, Kv], config: Config, source: Checkpoint | None
) -> Iterator[Failure]:
    prepared = read_preprocessor(source.side) if source else {}
    own = {"image_mean": _value(kv, MEAN), "image_std": _value(kv, STD)}
    pairs = mmproj_metadata(config, own | prepared, name="", size_label="", file_type=0)
    absent = ABSENT_IN_MMPROJ | {DEEPSTACK: ([False] * config.sizes["vD"],)}
    # llama.cpp's converter takes the text's for the tower's
    others = (_pixels(prepared) if source else _own_pixels(kv)) | {EPSILON: (config.eps,)}
    expected = {pair.key: pair for pair in pairs}
    sentences = key_differences(kv, expected, Reading("clip", absent, others))
    yield from (Failure(file.path.name, sentence) for sentence in first(sentences, MOST))


def _value(kv: Mapping[str, Kv], key: str) -> Any:
    if key not in kv:
        raise FormatError(f"{key} is missing")
    return kv[key].value


def _pixels(prepared: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Return the bounds of an image's size that the preprocessor states, by key."""
    size = prepared.get("size")
    edges = size if isinstance(size, dict) else {}
    bounds = {key: (prepared.get(a), edges.get(b)) for key, (a, b) in PIXELS.items()}
    return {key: tuple(n for n in both if n is not None) for key, both in bounds.items()}


def _own_pixels(kv: Mapping[str, Kv]) -> dict[str, tuple[Any, ...]]:
    """Return the bounds that the file itself states, where the larger one is not the least."""
    stated = {key: kv[key].value for key in PIXELS if key in kv}
    whole = all(type(number) is int and number > 0 for number in stated.values())
    right = whole and list(stated.values()) == sorted(stated.values())
    return {key: (number,) for key, number in stated.items()} if right else {}


def _tensors(
    infos: Mapping[str, TensorInfo], wanted: Mapping[str, tuple[VisionTensor, Shape]]
) -> Iterator[Failure]:
    for name in wanted:
        if name not in infos:
            yield Failure(name, "is missing from the vision file")
    for name, info in infos.items():
        if name not in wanted:
            yield Failure(name, "is in the vision file, but the tower has no such tensor")
            continue
        target, shape = wanted[name]
        if info.shape != shape:
            yield Failure(name, f"has shape {list(info.shape)}, expected {list(shape)}")
        if not target.takes(info.dtype):
            yield Failure(name, f"is {info.dtype}, but llama.cpp computes it in F32")


def _file_type(
    file: GgufFile, wanted: Mapping[str, tuple[VisionTensor, Shape]]
) -> Iterator[Failure]:
    """Yield the file type, if no weight has its type of those whose rows are whole blocks of it."""
    number = stated_type(file)
    if isinstance(number, Failure):
        yield number
    if not isinstance(number, int):
        return
    free = [name for name, (target, _) in wanted.items() if target.kind == "out"]
    weights = [file.infos[name] for name in free if name in file.infos]
    main = MAIN_TYPES.get(number)
    fitting = [i for i in weights if main and kinds.fallback(main, i.shape[-1]) == main] or weights
    stored = {info.dtype for info in fitting}
    if main is None or stored.isdisjoint(kinds.fallback(main, i.shape[-1]) for i in fitting):
        problem = f"{FILE_TYPE} is {number}, expected that of {', '.join(sorted(stored))}"
        yield Failure(file.path.name, problem)
