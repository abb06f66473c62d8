"""The executor of a calibrated conversion: all that needs no text, then layer after layer.

A layer's weights are durable and in the journal before the next one is run. An interrupted
conversion runs the layers that are written, and goes on with the first that is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from formats.checkpoint import Checkpoint
from qwen35_convert.calibration.device import CPU
from qwen35_convert.calibration.layers import Layers
from qwen35_convert.calibration.memory import device_bytes
from qwen35_convert.calibration.seen import append_seen
from qwen35_convert.calibration.texts import Texts
from qwen35_convert.containers.registry import CONTAINERS
from qwen35_convert.errors import MissingError
from qwen35_convert.planning.calibrated import stages
from qwen35_convert.planning.plan import Plan
from qwen35_convert.run.encoded import convert_item
from qwen35_convert.run.items import run_items
from qwen35_convert.run.worker import Effort, Worker
from qwen35_convert.write.journal import Journal
from qwen35_convert.write.sink import SEEN, FolderSink


@dataclass(frozen=True, slots=True)
class CalibratedExecutor:
    """Converts the items of a plan whose codes a text decides."""

    texts: Texts

    def __call__(
        self, plan: Plan, source: Checkpoint, sink: FolderSink, journal: Journal, effort: Effort
    ) -> None:
        """Convert every item that is not in the journal."""
        calibrated = stages(plan)
        left_out = {index for items in calibrated.values() for index in items}
        run_items(plan, source, sink, journal, effort, left_out)
        if left_out <= journal.done:
            return

        def encode(index: int, worker: Worker) -> None:
            convert_item(plan.items[index], source, sink, worker)
            effort.advance(plan.items[index])

        made = CONTAINERS[plan.container].open(sink.artifact)
        layers = Layers(plan, source, made, self.texts, effort.workers, effort.device, encode)
        with _device_memory(effort, device_bytes(plan, source, self.texts.tokens)):
            for items, seen in layers.run(journal.done):
                sink.sync()
                append_seen(sink.work / SEEN, seen, sink.left)
                journal.append(items)
                few = seen.note()
                effort.say(f"{seen.stage} is calibrated" + (f"; {few}" if few else ""))


@contextmanager
def _device_memory(effort: Effort, needed: int) -> Iterator[None]:
    """Say what a GPU needs. MissingError if it has less."""
    if effort.device == CPU:
        yield
        return
    import torch

    need = f"calibration takes up to {needed / 1e9:.1f} GB of its memory"
    effort.say(f"device {effort.device}: {need}")
    try:
        yield
    except torch.OutOfMemoryError:
        fix = "free it and run the same command again, or take --device cpu"
        raise MissingError(
            f"device {effort.device}: {need}, which it does not have", fix=fix
        ) from None
