"""How rows of a layer's weights make up for one another that are added to the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qwen35_convert.planning.calibrated import MIXED, adds_to_stream

if TYPE_CHECKING:
    from torch import Tensor

    from quant.fourbit.outputs import Outputs
    from runtime.layerwise import Walk


@dataclass(frozen=True, slots=True)
class Streams:
    """What reads the outputs of a layer's mixer, and those of its feed-forward.

    None: nothing is known of it, and rows are independent.
    """

    mixer: Outputs | None = None
    feed_forward: Outputs | None = None

    @staticmethod
    def of(walk: Walk, layer: int | None) -> Streams:
        """Return those of a layer of the walk's checkpoint; None: the MTP head's."""
        from quant.fourbit.outputs import outputs
        from runtime.stream import readers_grams

        mixed, fed = readers_grams(walk, layer)
        mixer = outputs(mixed)
        return Streams(mixer, mixer if fed is mixed else outputs(fed))

    def outputs(self, name: str) -> Outputs | None:
        """Return what reads the outputs of a weight, None if its rows are independent."""
        if not adds_to_stream(name):
            return None
        return self.mixer if name.rpartition(".")[2] in MIXED else self.feed_forward

    def shares(self) -> Iterator[Tensor]:
        """Yield all that rows are told, each once."""
        for one in (self.mixer, None if self.feed_forward is self.mixer else self.feed_forward):
            yield from one.shares if one else ()
