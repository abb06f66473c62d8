"""Calibrated weights: the calibration is run again and compared byte for byte, or they are judged.

Run again: the text that the receipt names is at hand, and the sums of a layer come out as the
receipt has them. On another machine they come out with other last digits, and with them other
codes: from that layer on weights are judged by what any encoder of their scheme may do. So they are
where the text or the GPU that calibrated is missing, on request, and behind a layer that is not
what it should be, because its outputs are the inputs of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from formats.errors import FormatError
from quant.errors import QuantError
from quant.measure import Error
from quant.opening import open_value
from qwen35_convert.calibration.device import CPU, device_named
from qwen35_convert.calibration.layers import Layers
from qwen35_convert.calibration.texts import Texts
from qwen35_convert.planning.calibrated import stages
from qwen35_convert.run.worker import Worker
from qwen35_convert.verification.compare import Compared, compare_atom
from qwen35_convert.verification.reencode import Again, Files


@dataclass
class Recalibration:
    """Calibrated atoms on trial.

    again      what makes an artifact again
    claimed    what its receipt says of the calibration, or is going to say
    texts      the text, None if it is not at hand
    by_bounds  the calibration is not to be run again
    why        why the text is not available, or why the rest was judged by bounds; None: all was
               proven
    """

    again: Again
    claimed: Mapping[str, Any]
    texts: Texts | None
    by_bounds: bool = False
    why: str | None = None
    proven: list[str] = field(default_factory=list)

    def run(self) -> list[Compared]:
        """Return every calibrated atom with its error and its faults."""
        plan, files = self.again.plan, Files(self.again.artifact)
        again = dict(self._made_again(files))
        rest = [i for items in stages(plan).values() for i in items if i not in again]
        there = [i for i in rest if files.holds(plan.items[i].outputs)]
        return [*again.values(), *(self._judged(plan.items[i].atom.name) for i in there)]

    def told(self) -> dict[str, Any]:
        """Return what the report says of it."""
        quantize, layers = self.again.plan.recipe.quantize, stages(self.again.plan)
        return {
            "method": quantize.method,
            "proof": "bounds" if self.why else "again",
            "layers": len(layers),
            "layers_again": len(self.proven),
            "why": self.why,
        }

    def _made_again(self, files: Files) -> Iterator[tuple[int, Compared]]:
        texts, device = self.texts, self._device()
        if texts is None or device is None or not self._may_run():
            return
        plan, made = self.again.plan, dict[int, Compared]()

        def encode(index: int, worker: Worker) -> None:
            item = plan.items[index]
            if files.holds(item.outputs):
                held = item.scheme.cost(moved=True).write
                made[index] = self.again.one(item, files, worker, held)

        again = self.again
        layers = Layers(plan, again.source, again.artifact, texts, again.workers, device, encode)
        try:
            for items, seen in layers.run():
                if self._differs(seen.stage, seen.as_dict()):
                    self.why = f"the sums of {seen.stage} come out differently on this machine"
                    return
                yield from ((i, made[i]) for i in sorted(items) if i in made)
                self.proven.append(seen.stage)
                if any(i not in made or made[i].faults for i in items):
                    self.why = f"{seen.stage} is not what it should be, and the next run on it"
                    return
        except (QuantError, FormatError) as error:
            self.why = f"the calibration cannot be run again: {error}"

    def _device(self) -> str | None:
        """Return the device that calibrated, None if it is not here."""
        name = str(self.claimed.get("device", CPU))
        device = device_named(name)
        if device is None and self.why is None:
            self.why = f"it was calibrated on {name}, which is not here"
        return device

    def _may_run(self) -> bool:
        """Whether the calibration can be run again, and is to be."""
        if self.by_bounds:
            self.why = "as was asked for"
        elif self.again.artifact.layout.problems:
            self.why = "the artifact has problems"
        return self.why is None

    def _differs(self, stage: str, seen: Mapping[str, Any]) -> bool:
        layers = self.claimed.get("layers")
        claim = layers.get(stage) if isinstance(layers, dict) else None
        digest = claim.get("sums_sha256") if isinstance(claim, dict) else None
        return bool(digest != seen["sums_sha256"])

    def _judged(self, name: str) -> Compared:
        """Return an atom judged by its scheme's bounds, its error measured as for a receipt."""
        again = self.again
        if name not in again.artifact.layout.atoms:
            item = next(i for i in again.plan.items if i.atom.name == name)
            line = name, item.outputs[0].name, item.atom.role, item.scheme.name
            return Compared(*line, Error(), ("has parts that make no weight",), by_bounds=True)
        compared = compare_atom(again.artifact, again.source, name)
        if compared.faults:
            return replace(compared, by_bounds=True)
        ours = open_value(again.artifact, again.artifact.layout.atoms[name])
        theirs = open_value(again.source, again.source.layout.atoms[name])
        error, scheme = Error(), ours.scheme
        for start, stop in theirs.chunks(max(scheme.row_multiple, 1), held=24):
            w = ours.in_stored_order(theirs.exact(start, stop))
            error += scheme.measure(w, ours.stored(start, stop))
            ours.release(start, stop)
            theirs.release(start, stop)
        return replace(compared, error=error, by_bounds=True)
