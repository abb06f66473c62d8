"""`bench`: how fast an artifact runs on this machine, compared with the hardware limit.

Each point is one step: a token for each sequence of a batch at a context, or a whole prompt. Bytes
and operations are counted from the artifact; the floor is the time the card needs to move and
compute them. `fraction_of_floor` is the floor divided by the measured time.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from qwen35_convert.benchmarking.point import Point
from qwen35_convert.benchmarking.sweep import Sweep
from qwen35_convert.benchmarking.work import Work, count_work
from qwen35_convert.options import check_device
from qwen35_convert.versions import version

if TYPE_CHECKING:
    from runtime.floors import Card
    from runtime.timing import Timing
    from runtime.weights import Model


@dataclass(frozen=True, slots=True)
class Bench:
    """All points, the machine, the versions."""

    artifact: str
    device: str
    points: list[Point]
    peer: str | None
    versions: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return what `bench --json` prints."""
        return asdict(self)


def run_bench(
    checkpoint: Checkpoint, sweep: Sweep, progress: Callable[[str], object] = lambda _: None
) -> Bench:
    """Time the artifact. MissingError if the device, or the peer's package, is not there."""
    import torch

    from runtime.floors import card_of
    from runtime.load import load_model
    from runtime.timing import alone

    device = _device_name(sweep.device)
    peer = _peer(sweep)
    dtype = torch.bfloat16 if sweep.device == "cuda" else torch.float32
    with alone(sweep.lock, shared=True):
        model = load_model(
            checkpoint,
            sweep.device,
            dtype,
            keep_fp8=sweep.device == "cuda",
            dynamic_fp8=sweep.dynamic_fp8,
        )
    rig = _Rig(model, count_work(checkpoint), card_of(device), device)
    points = []
    for what, size in _steps(sweep):
        progress(f"{what} {size}")
        points.append(rig.measure(what, size, sweep))
    if peer is not None:
        del rig, model
        torch.cuda.empty_cache()
        points = list(peer(checkpoint, points, sweep))
    return Bench(checkpoint.name, device, points, sweep.peer, _versions(sweep.peer))


def _steps(sweep: Sweep) -> Iterator[tuple[str, int]]:
    yield from (("decode", batch) for batch in sweep.batch)
    yield from (("prefill", tokens) for tokens in sweep.prefill)


@dataclass(frozen=True, slots=True)
class _Rig:
    """A loaded model and what its steps are compared with."""

    model: Model
    work: Work
    card: Card | None
    device: str

    def measure(self, what: str, size: int, sweep: Sweep) -> Point:
        """Time a decode step of `size` sequences, or a prompt of `size` tokens."""
        import torch

        from runtime.timing import decode_time, prefill_time

        on_gpu = self.model.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        decodes, context, lock = what == "decode", sweep.context, sweep.lock
        if decodes:
            took = decode_time(self.model, size, context, lock=lock)
        else:
            took = prefill_time(self.model, size, lock=lock)
        peak = torch.cuda.max_memory_allocated() if on_gpu else None
        return self._point(what, (size, context) if decodes else (1, size), took, peak)

    def _point(self, what: str, shape: tuple[int, int], took: Timing, peak: int | None) -> Point:
        batch, tokens = shape
        count, floor = batch if what == "decode" else tokens, None
        if self.card and what == "decode":
            floor = self.work.decode_floor_ms(self.card, batch, tokens)
        elif self.card:
            floor = self.work.prefill_floor_ms(self.card, tokens)
        return Point(
            what,
            batch,
            tokens,
            took.ms,
            took.eager_ms,
            count / took.ms * 1e3,
            self.work.step_bytes(count, sequences=batch, context=tokens),
            self.work.step_flops(count, sequences=batch, context=tokens),
            floor,
            floor / took.ms if floor else None,
            peak,
            self.device,
        )


def _device_name(device: str) -> str:
    """Return the name of the device. MissingError for a GPU that is not there."""
    import torch

    check_device(device, fix="--device cpu times the reference path")
    if device == "cpu":
        return platform.processor() or platform.machine()
    return torch.cuda.get_device_name()


Peer = Callable[[Checkpoint, Sequence[Point], Sweep], Iterator[Point]]


def _peer(sweep: Sweep) -> Peer | None:
    if sweep.peer is None:
        return None
    from qwen35_convert.benchmarking.peers import find_peer

    return find_peer(sweep.peer)


def _versions(peer: str | None) -> dict[str, str]:
    from qwen35_convert.benchmarking.peers import PACKAGES

    packages = ["torch", "triton"]
    if peer is not None:  # transformers runs FLA's kernels wherever they are
        packages += ["transformers", *PACKAGES.values()] if peer != "vllm" else ["vllm"]
    versions = {"qwen35": version()}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
