"""Layer by layer: inputs are collected, weights encoded by them, and what was stored runs on.

    x_0 = the embedding, as it is stored
    sums_i = inputs of the source's layer i on x_i        x_i+1 = layer i, as it is stored, on x_i

Of what layer i adds to the stream an error counts by what the source makes of it next.

Weights of an input are encoded as soon as its last token has been seen; then its sums are
forgotten. So are layers: those of the artifact are read back from what was written, which is also
how a conversion goes on that was interrupted, and how an artifact is proven.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from qwen35_convert.calibration.embedding import embedding_sums
from qwen35_convert.calibration.encoder import Encode, Encoder
from qwen35_convert.calibration.seen import Seen
from qwen35_convert.calibration.streams import Streams
from qwen35_convert.calibration.texts import Texts
from qwen35_convert.planning.calibrated import EMBEDDING, ENDS, HEAD, layer_of, stages
from qwen35_convert.planning.plan import Plan
from qwen35_convert.recipe.parts import GPTQ, SWEEP
from qwen35_convert.run.heap import share_heap
from qwen35_convert.run.threads import one_torch_thread
from qwen35_convert.run.worker import Preparation

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.layerwise import Walk

MAPPED_FROM = 4 << 20  # memory is counted piece by piece, so larger ones are given back


@dataclass(frozen=True, slots=True)
class Layers:
    """The calibrated layers of a plan.

    made     the artifact, whose layers are read when all before them are written
    workers  threads; no byte depends on how many
    encode   called on threads for each calibrated item, by its number
    """

    plan: Plan
    source: Checkpoint
    made: Checkpoint
    texts: Texts
    workers: int
    device: str
    encode: Encode

    def run(self, done: Collection[int] = ()) -> Iterator[tuple[list[int], Seen]]:
        """Yield each layer's items when they have been encoded, with what was seen of their inputs.

        done  items that are written: a layer of which all are is only run

        QuantError for sums that are not finite.
        """
        import torch

        from runtime.workers import Workers

        share_heap(mapped_from=MAPPED_FROM)
        threads = self.workers if self.device == "cpu" else 1
        with one_torch_thread(), Workers(self.device, threads) as workers:
            over = {"device": self.device, "dtype": torch.float32, "workers": workers}
            walked = _Walked(self, over)
            for stage, items in stages(self.plan).items():
                if not set(items) <= set(done):
                    yield items, walked.collect(stage, items)


class _Walked:
    """The two walks: the source's, which is observed, and the artifact's, which goes on."""

    def __init__(self, layers: Layers, over: dict[str, Any]) -> None:
        from runtime.layerwise import Walk

        self.layers, self.prepared = layers, Preparation(layers.source)
        self.observer: Any = None
        texts = layers.texts.ids
        self.observed: Walk = Walk.over(layers.source, texts, observer=self, **over)
        self.stored: Walk = Walk.over(layers.made, texts, **over)
        self.x: Tensor | None = None
        self.at = 0

    def observe(self, names: Sequence[str], x_TK: Tensor) -> None:
        """Show an input to the observer of the layer."""
        self.observer.observe(names, x_TK)

    def collect(self, stage: str, items: list[int]) -> Seen:
        """Run the source's layer; encode the items of each input when it is complete."""
        from runtime.hessian import Hessians

        layers, number = self.layers, layer_of(stage)
        x = None if stage == EMBEDDING else self._stream_before(number)
        encoder = Encoder(layers.plan, layers.source, layers.encode, layers.workers, layers.device,
                          self.prepared, stage, items,
                          self._streams(stage))  # fmt: skip
        texts, squares = layers.texts, layers.plan.recipe.quantize.method == SWEEP
        in_mtp = number is None and stage not in ENDS
        tokens = texts.tokens - len(texts.chunks) if in_mtp else texts.tokens
        self.observer = Hessians(
            encoder.numbers, tokens, encoder.experts, encoder.finished, squares=squares
        )
        if x is None:
            encoder.finished(embedding_sums(self.observed))
        elif number is not None:
            self.observed.layer(number, x)
        elif stage == HEAD:
            self.observed.hidden(x)
        else:
            self.observed.mtp(self.stored.hidden(x))
        return encoder.close()

    def _stream_before(self, layer: int | None) -> Tensor:
        """Return what a layer reads of the artifact; None: what comes after all of them."""
        if self.x is None:
            self.x = self.stored.embedded()
        before = len(self.stored.config.layer_types) if layer is None else layer
        for i in range(self.at, before):
            self.x, self.at = self.stored.layer(i, self.x), i + 1
        return self.x

    def _streams(self, stage: str) -> Streams:
        """Return how rows make up for one another that are added to the stream in a layer."""
        coupled = self.layers.plan.recipe.quantize.method == GPTQ and stage not in ENDS
        return Streams.of(self.observed, layer_of(stage)) if coupled else Streams()
