"""Right artifacts of few bits that others saved again, or encoded for inputs that nobody knows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial

import torch

from quant.choices import Choices
from quant.fourbit.hessian import factor
from quant.fourbit.int4 import INT4
from quant.fourbit.int8 import INT8
from quant.fourbit.mxfp4 import MXFP4
from quant.fourbit.nvfp4 import NVFP4
from quant.fourbit.parts import GLOBAL
from quant.scheme import Scheme
from tests.planted.artifact import Artifact
from tests.planted.edit import Entry, TensorFile, Tensors, editing
from tests.planted.source_faults import original

Change = Callable[[Artifact], object]
FORMS: dict[str, Scheme] = {
    "nano-nvfp4a16": NVFP4,
    "moe-nvfp4a16": NVFP4,
    "nano-mxfp4a16": MXFP4,
    "nano-int4-g32": INT4.with_choices(Choices(group=32, symmetric=False)),
    "nano-int8": INT8,
}
SHARDS = 3


def changes() -> Iterator[tuple[str, str, str, Change]]:
    """Yield kind, name, base and change of each."""
    for base in (*FORMS, "moe-nvfp4-mixed"):
        yield "saved again", "in shards", base, _in_shards
        yield "saved again", "by name", base, _by_name
    for base, scheme in FORMS.items():
        yield "encoder", "gptq", base, partial(_encode_all, scheme=scheme)


def _in_shards(artifact: Artifact) -> None:
    """Deal tensors out to files, parts of a weight apart; write JSON files in order of keys."""
    artifact.strip()
    with editing(artifact) as tensors:
        (whole,) = tensors.files
        whole.path.unlink()
        entries = list(reversed(whole.entries.items()))
        tensors.files = [
            TensorFile(
                whole.path.with_name(f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"),
                dict(entries[i::SHARDS]),
                {"format": "pt"},
            )
            for i in range(SHARDS)
        ]
    _order_keys(artifact)


def _by_name(artifact: Artifact) -> None:
    """Store tensors by name, without metadata; write JSON files in order of keys."""
    artifact.strip()
    with editing(artifact) as tensors:
        for file in tensors.files:
            file.entries, file.metadata = dict(sorted(file.entries.items())), {}
    _order_keys(artifact)


def _order_keys(artifact: Artifact) -> None:
    for name in ("config.json", "generation_config.json"):
        value = json.loads(artifact.file(name).read_bytes())
        artifact.write(name, json.dumps(value, indent=4, sort_keys=True))


def _encode_all(artifact: Artifact, scheme: Scheme) -> None:
    artifact.strip()
    with editing(artifact) as tensors:
        encode(tensors, scheme)


def encode(tensors: Tensors, scheme: Scheme, gain: float = 1.0) -> None:
    """Encode every weight anew by GPTQ, for inputs of few tokens and unequal columns.

    gain  by what the weights are multiplied before
    """
    for weight in _weights(tensors, scheme):
        _encode_one(tensors, weight, scheme, gain)


def _weights(tensors: Tensors, scheme: Scheme) -> list[str]:
    """Return the names of all weights that are stored in this scheme."""
    first, names = scheme.parts("", (8, 128))[0].info.name, set(tensors.names())
    bases = (name.removesuffix(first) for name in names if name.endswith(f"weight{first}"))
    return sorted(base for base in bases if base + "_scale" in names)


def _encode_one(tensors: Tensors, weight: str, scheme: Scheme, gain: float) -> None:
    hub = weight.removeprefix("model.language_model.").removeprefix("model.")
    w = gain * original(tensors, hub)
    names = {part.key: part.info.name for part in scheme.parts(weight, tuple(w.shape))}
    known = factor(_inputs(w.shape[1]))
    whole = tensors.entry(names[GLOBAL]).view().clone() if GLOBAL in names else None
    for key, part in scheme.encode(w, whole, factor=known).items():
        entry: Entry = tensors.entry(names[key])
        entry.put(part)


def _inputs(columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(96, columns, generator=generator)
    x = x @ (torch.eye(columns) + torch.randn(columns, columns, generator=generator) / columns**0.5)
    x = x * torch.randn(columns, generator=generator).exp()
    return x.T @ x / len(x)
