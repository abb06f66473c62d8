"""Faults of the index, and of what headers say beside the tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.planted.artifact import Artifact
from tests.planted.edit import INDEX, editing
from tests.planted.fault import FORGED, STRUCTURE, UNOPENED, Fault, Names, Where, in_outputs
from tests.planted.side_faults import HOMES, half, remove, replace

SHARDED = in_outputs("sharded")


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""

    def add(name: str, plant: Callable[[Artifact], Names], where: Where = HOMES, **more: Any):
        return Fault("index", name, plant, where, STRUCTURE, **more)

    yield add("total-too-small", partial(_total, change=-1))
    yield add("total-doubled", partial(_total, change=None))
    yield add("total-of-text", partial(_stated, total="many"))
    yield add("metadata-a-list", _list_metadata)
    yield add("missing", partial(remove, file=INDEX), SHARDED)
    yield add("missing-of-one-file", partial(remove, file=INDEX), receipts=(FORGED,))
    yield add("a-tensor-in-another-file", _misplace, SHARDED, codes=UNOPENED)
    yield add("a-tensor-left-out", _leave_out)
    yield add("a-tensor-too-many", _promise, codes=UNOPENED)
    yield add("a-file-that-is-not-there", _rename, codes=UNOPENED)
    yield add(
        "an-empty-map", partial(replace, file=INDEX, content='{"weight_map": {}}'), codes=UNOPENED
    )
    yield add("cut", partial(replace, file=INDEX, content=half), codes=UNOPENED)
    yield add("stray-shard", _stray)
    for name, metadata in (("of-mlx", {"format": "mlx"}), ("of-tensorflow", {"format": "tf"})):
        yield add(f"header-{name}", partial(_metadata, metadata=metadata))
    more = {"format": "pt", "made_by": "x"}
    yield add("header-says-more", partial(_metadata, metadata=more), receipts=(FORGED,))


def _total(artifact: Artifact, change: int | None) -> tuple[str, ...]:
    with artifact.json(INDEX) as index:
        total = index["metadata"]["total_size"]
        index["metadata"]["total_size"] = 2 * total if change is None else total + change
    return (INDEX, "total_size")


def _stated(artifact: Artifact, total: object) -> tuple[str, ...]:
    with artifact.json(INDEX) as index:
        index["metadata"]["total_size"] = total
    return (INDEX, "total_size")


def _list_metadata(artifact: Artifact) -> tuple[str, ...]:
    with artifact.json(INDEX) as index:
        index["metadata"] = []
    return (INDEX, "metadata")


def _some_tensor(index: dict[str, Any]) -> str:
    return next(name for name in index["weight_map"] if name.endswith("up_proj.weight"))


def _misplace(artifact: Artifact) -> str:
    with artifact.json(INDEX) as index:
        name, files = _some_tensor(index), sorted(set(index["weight_map"].values()))
        index["weight_map"][name] = next(f for f in files if f != index["weight_map"][name])
    return name


def _leave_out(artifact: Artifact) -> str:
    with artifact.json(INDEX) as index:
        name = _some_tensor(index)
        del index["weight_map"][name]
    return name


def _promise(artifact: Artifact) -> str:
    with artifact.json(INDEX) as index:
        file = index["weight_map"][_some_tensor(index)]
        index["weight_map"]["model.layers.0.extra.weight"] = file
    return "model.layers.0.extra.weight"


def _rename(artifact: Artifact) -> str:
    with artifact.json(INDEX) as index:
        index["weight_map"][_some_tensor(index)] = "model-00009-of-00009.safetensors"
    return "model-00009-of-00009.safetensors"


def _stray(artifact: Artifact) -> str:
    """Leave a file of an earlier conversion beside the others: SGLang and others load by glob."""
    first = artifact.tensor_files()[0]
    artifact.write("model-00007-of-00008.safetensors", first.read_bytes())
    return "model-00007-of-00008.safetensors"


def _metadata(artifact: Artifact, metadata: dict[str, str]) -> str:
    with editing(artifact) as tensors:
        tensors.files[0].metadata = metadata
    return tensors.files[0].path.name
