"""Right scales of an FP8 cache as others write them: other names, types, texts, fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tests.planted.artifact import CACHED, Artifact
from tests.planted.cache_faults import KEY, SCHEME, VALUE, stored
from tests.planted.config_faults import CONFIG
from tests.planted.edit import Tensors, editing
from tests.planted.quantization_faults import BLOCK

Change = Callable[[Artifact], object]
LASTS = (KEY, VALUE)


def changes() -> Iterator[tuple[str, str, str, Change]]:
    """Yield kind, name, base and change of each."""
    for base in CACHED:
        for name, how in TENSORS.items():
            yield "caches", name, base.id, partial(_tensors, how=how)
        for name, fields in SCHEMES.items():
            yield "caches", name, base.id, partial(_scheme, fields=fields)


def _tensors(artifact: Artifact, how: Callable[[Tensors], object]) -> None:
    artifact.strip()
    with editing(artifact) as tensors:
        how(tensors)


def _scheme(artifact: Artifact, fields: dict[str, object]) -> None:
    artifact.strip()
    with artifact.json(CONFIG) as config:
        config[BLOCK][SCHEME] = fields


def _each(how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for last in LASTS:
            entry = tensors.entry(stored(tensors, last))
            entry.put(how(entry.view()))

    return change


def _named(*names: str) -> Callable[[Tensors], None]:
    """Return a change that names the scales otherwise."""

    def change(tensors: Tensors) -> None:
        for last, name in zip(LASTS, names, strict=True):
            entries = tensors.home(stored(tensors, last)).entries
            entry = entries.pop(stored(tensors, last))
            other = stored(tensors, name)
            entries[other] = entry.renamed(other)

    return change


TENSORS: dict[str, Callable[[Tensors], object]] = {
    "scales in F32": _each(torch.Tensor.float),
    "scales in F16": _each(torch.Tensor.half),
    "scales without an axis": _each(lambda scale: scale.reshape(())),
    "scales of another text": _each(lambda scale: scale * 1.4),
    "scales of half a text": _each(lambda scale: scale * 0.7),
    "scales of 1": _each(torch.ones_like),
    "names of ModelOpt": _named("k_proj.k_scale", "v_proj.v_scale"),
    "names of old compressed-tensors": _named("k_proj.output_scale", "v_proj.output_scale"),
}
SCHEMES: dict[str, dict[str, object]] = {
    "fields of ModelOpt": {"num_bits": 8, "type": "float", "dynamic": False},
    "fields of llm-compressor": {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "group_size": None,
        "strategy": "tensor",
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
        "scale_dtype": None,
        "zp_dtype": None,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
    },
}
