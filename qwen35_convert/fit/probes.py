"""Probes: the KL of a source some of whose weights are rounded, without writing an artifact.

The source's own pass over the text is kept in a file while the probes run; each of them then costs
one pass, with one layer in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from quant.stored import Value
from qwen35_convert.fit.rounded import Rounder
from qwen35_convert.fit.scales import Place
from qwen35_convert.planning.plan import Item
from qwen35_convert.verification.logits_cache import LogitsCache

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.reader import Change

Forms = Mapping[str, tuple[Item, str]]


@dataclass(frozen=True)
class Probes:
    """Measures one source over one text.

    ids_NT  token ids [N, T], each row a text of its own
    folder  where the source's pass is kept
    """

    source: Checkpoint
    rounder: Rounder
    ids_NT: Tensor
    device: str
    folder: Path

    def kl(self, forms: Forms) -> float:
        """Return the mean KL in nats after these weights, by name, were rounded to their forms."""
        from runtime.compare import changed_logits

        change = self._change(forms)
        with LogitsCache.of(self.folder, self.source, self.ids_NT, self.device).opened() as kept:
            report = changed_logits(self.source, change, self.ids_NT, device=self.device, kept=kept)
        return max(0.0, report.kl_mean)

    def moved(
        self, of_layer: Callable[[int], Mapping[Place, Forms]]
    ) -> Iterator[dict[Place, float]]:
        """Yield, layer by layer, how far weights of each place move the stream that leaves it.

        of_layer  gives the weights of each place in a layer with their forms
        """
        from runtime.moved import moved_by

        def changes(layer: int) -> list[Change]:
            return [self._change(forms) for forms in of_layer(layer).values()]

        moves = moved_by(self.source, changes, self.ids_NT, device=self.device)
        for layer, moved in enumerate(moves):
            yield dict(zip(of_layer(layer), moved, strict=True))

    def _change(self, forms: Forms) -> Change:
        def change(value: Value) -> Value:
            known = forms.get(value.atom.name)
            return value if known is None else self.rounder.rounded(value, *known)

        return change
