"""Right artifacts, ours and others': `verify` finds nothing wrong with any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from qwen35_convert import api
from qwen35_convert.recipe.recipe import read_recipe
from tests.planted import (
    right_beside,
    right_caches,
    right_configs,
    right_encoders,
    right_folders,
    right_fourbit,
    right_gguf,
    right_gguf_keys,
    right_libraries,
    right_places,
    right_sides,
    right_tensors,
)
from tests.planted.artifact import BASES, CACHED, FEW_BITS, Artifact, Base, Workshop, find_base

Made = tuple[Path, Path]
"""An artifact, and the source that it is verified against."""


@dataclass(frozen=True, slots=True)
class Right:
    """A right artifact, made below a new folder."""

    kind: str
    name: str
    make: Callable[[Workshop, Path], Made]

    @property
    def id(self) -> str:
        """How tests and tables name it."""
        return f"{self.kind}-{self.name}".replace(" ", "-")


def artifacts() -> list[Right]:
    """Return every right artifact."""
    return [*_ours(), *_by_recipe(), *_again(), *_changed()]


def _ours() -> Iterator[Right]:
    """Yield every base, with its receipt and without."""
    for base in (*BASES, *FEW_BITS, *CACHED):
        yield Right("ours", base.id, partial(_base, base=base, receipt=True))
        yield Right("ours", f"{base.id} without receipt", partial(_base, base=base, receipt=False))


def _base(workshop: Workshop, folder: Path, base: Base, *, receipt: bool) -> Made:
    artifact = workshop.place(base, folder)
    if not receipt:
        artifact.strip()
    return artifact.path, artifact.source


def _by_recipe() -> Iterator[Right]:
    """Yield what other recipes make."""
    for name, (model, out, recipe, overrides, workers) in RECIPES.items():
        make = partial(
            _convert, model=model, out=out, recipe=recipe, overrides=overrides, workers=workers
        )
        yield Right("recipe", name, make)


def _convert(
    workshop: Workshop,
    folder: Path,
    model: str,
    out: str,
    recipe: str,
    overrides: tuple[str, ...],
    workers: int,
) -> Made:
    folder.mkdir()
    source = workshop.model(model)
    options = api.RunOptions(workers=workers, verify=False)
    api.convert(source, folder / out, read_recipe(recipe, overrides), options=options)
    return _first(folder / out), source


def _first(out: Path) -> Path:
    """Return OUT, or the first part of it."""
    if out.exists():
        return out
    return min(out.parent.glob(f"{out.stem}-00001-of-*.gguf"))


NO_MTP = ("mtp=drop",)
FP8_CACHE = ("quantize.kv_cache=fp8", "quantize.calibrate.tokens=1024")
THEIRS = ("quantize.mix=llama.cpp",)
# name: (model, OUT, bundled recipe, what differs, workers)
RECIPES: dict[str, tuple[str, str, str, tuple[str, ...], int]] = {
    "two workers": ("wide", "out", "fp8-block", (), 2),
    "two workers with experts": ("moe", "out", "fp8-block-hub", (), 2),
    "two workers to a file": ("moe", "m.gguf", "gguf-q4_k_m", (), 2),
    "delta rule kept": ("nano", "out", "fp8-block-gdn", (), 1),
    "scales in float32": ("nano", "out", "fp8-block", ("quantize.scale=float32",), 1),
    "scales in bfloat16": ("wide", "out", "fp8-block", ("quantize.scale=bfloat16",), 1),
    "channel scales in float32": ("moe", "out", "fp8-channel", ("quantize.scale=float32",), 1),
    "without mtp": ("nano", "out", "fp8-block", NO_MTP, 1),
    "hub without mtp": ("moe", "out", "fp8-block-hub", NO_MTP, 1),
    "file without mtp": ("moe", "m.gguf", "gguf-q8_0", NO_MTP, 1),
    "fused experts": ("moe", "out", "bf16-split", ("experts=fused",), 1),
    "sharded experts": ("moe", "out", "bf16-split", ("export.max_shard_size=500KB",), 1),
    "sharded hub": ("nano", "out", "fp8-block-hub", ("export.max_shard_size=300KB",), 1),
    "embedding quantised": (
        "wide",
        "out",
        "fp8-channel",
        ("quantize.rules=[{match: lm_head, scheme: fp8-channel}]",),
        1,
    ),
    "a slice": ("nano", "out", "fp8-block", ("only=layers.0.*",), 1),
    "a slice of attention": ("wide", "out", "bf16-split", ("only=layers.2.self_attn.*",), 1),
    "a slice of experts": ("moe", "out", "fp8-block", ("only=layers.1.mlp.experts.*",), 1),
    "a slice of mtp": ("nano", "out", "fp8-block-hub", ("only=mtp.*",), 1),
    "a slice in shards": (
        "moe",
        "out",
        "bf16-split",
        ("only=layers.*", "export.max_shard_size=300KB"),
        1,
    ),
    "a model without mtp": ("cast", "out", "fp8-block", (), 1),
    "a model without mtp in a file": ("cast", "m.gguf", "gguf-q5_k_m", (), 1),
    "split with vision": (
        "wide",
        "m.gguf",
        "gguf-q6_k",
        ("vision=keep", "export.max_shard_size=700KB"),
        1,
    ),
    "mix of llama.cpp q4": ("wide", "m.gguf", "gguf-q4_k_m", THEIRS, 1),
    "mix of llama.cpp q5 with experts": ("moe", "m.gguf", "gguf-q5_k_m", THEIRS, 1),
    "mix of llama.cpp q8": ("nano", "m.gguf", "gguf-q8_0", THEIRS, 1),
    "mix of llama.cpp mxfp4": ("moe", "m.gguf", "gguf-mxfp4_moe", THEIRS, 1),
    "an FP8 cache beside channels": ("moe", "out", "fp8-channel", FP8_CACHE, 1),
    "an FP8 cache of a text model": ("cast", "out", "fp8-block", FP8_CACHE, 1),
    "an FP8 cache beside four bits": ("nano", "out", "nvfp4-mixed", FP8_CACHE, 1),
    "an FP8 cache without mtp": ("wide", "out", "fp8-block-kv8", NO_MTP, 1),
    "f16": ("wide", "m.gguf", "gguf-bf16", ("quantize.scheme=f16",), 1),
    "f32": ("nano", "m.gguf", "gguf-bf16", ("quantize.scheme=f32",), 1),
    "f32 vision": ("wide", "m.gguf", "gguf-bf16", ("quantize.scheme=f32", "vision=keep"), 1),
}


def _again() -> Iterator[Right]:
    """Yield artifacts of artifacts, verified against those."""
    for name, (base, out, recipe) in AGAIN.items():
        make = partial(_reconvert, base=find_base(base), out=out, recipe=recipe)
        yield Right("again", name, make)
    yield Right("again", "quantised in its own layout", _quantize)


AGAIN = {
    "file to folder": ("wide-bf16", "out", "bf16-split"),
    "file to FP8": ("nano-bf16", "out", "fp8-block"),
    "quantised file to folder": ("moe-q8_0", "out", "bf16-split"),
    "FP8 to BF16": ("nano-fp8-block", "out", "bf16-split"),
    "FP8 to a file": ("moe-fp8-block", "m.gguf", "gguf-q8_0"),
    "hub's FP8 to text": ("nano-fp8-block-hub", "out", "bf16-split"),
    "channels to blocks": ("wide-fp8-channel", "out", "fp8-block"),
    "split file to one": ("wide-split", "m.gguf", "gguf-q4_k_m"),
    "shards to one": ("wide-sharded", "out", "bf16-split"),
    "an FP8 cache to BF16": ("wide-fp8-block-kv8", "out", "bf16-split"),
    "an FP8 cache to a file": ("moe-fp8-block-kv8", "m.gguf", "gguf-q8_0"),
    "an FP8 cache again": ("moe-fp8-block-kv8", "out", "fp8-block-kv8"),
    "mixed to BF16": ("wide-mixed", "out", "bf16-split"),
}


def _reconvert(workshop: Workshop, folder: Path, base: Base, out: str, recipe: str) -> Made:
    source = workshop.place(base, folder)
    api.convert(source.path, folder / out, read_recipe(recipe))
    return folder / out, source.path


def _quantize(workshop: Workshop, folder: Path) -> Made:
    folder.mkdir()
    source = workshop.model("moe")
    api.quantize(source, folder / "out", "fp8-block", api.RunOptions(workers=1, verify=False))
    return folder / "out", source


def _changed() -> Iterator[Right]:
    """Yield bases that are changed as other tools, and right ones, would have made them."""
    for table in (
        right_encoders,
        right_folders,
        right_fourbit,
        right_configs,
        right_sides,
        right_gguf,
        right_gguf_keys,
        right_tensors,
        right_caches,
    ):
        for kind, name, base, change in table.changes():
            yield Right(kind, f"{name} {base}", partial(_change, base=base, change=change))
    makers = (
        right_libraries,
        right_beside,
        right_gguf,
        right_gguf_keys,
        right_tensors,
        right_places,
    )
    for table in makers:
        for kind, name, make in table.makers():
            yield Right(kind, name, make)


def _change(
    workshop: Workshop, folder: Path, base: str, change: Callable[[Artifact], object]
) -> Made:
    artifact = workshop.place(find_base(base), folder)
    change(artifact)
    return artifact.path, artifact.source
