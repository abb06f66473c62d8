"""How far changed weights of a layer move the residual stream that leaves it.

    moved = mean over tokens of   sum over the stream of (x_changed - x)^2      after the layer

Shape letters: N texts, T tokens of each, R = N*T rows, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from runtime.layerwise import Walk
from runtime.reader import Change
from runtime.workers import Workers


@torch.inference_mode()
def moved_by(
    source: Checkpoint,
    changes: Callable[[int], Sequence[Change]],
    ids_NT: Tensor,
    *,
    device: torch.device | str,
) -> Iterator[list[float]]:
    """Yield, layer by layer, how far each of its changes moves the residual stream.

    changes  of layer i, each of which gives what is read in place of a tensor; the layer's inputs
             are the source's own

    FormatError if the source has problems. One layer is in memory, and three streams R*H float32.
    """
    with Workers(device) as workers:
        walks = [
            Walk.over(source, list(ids_NT), device=device, dtype=torch.float32, workers=workers)
            for _ in range(2)
        ]
        before = walks[0].embedded()
        for i in range(len(source.config.layer_types)):
            after, moved = walks[0].layer(i, before), []
            for change in changes(i):
                walks[1].use_changed(change)
                moved.append(_mean_square(walks[1].layer(i, before) - after))
            yield moved
            before = after


def _mean_square(change_RH: Tensor) -> float:
    return float(change_RH.square().sum(1, dtype=torch.float64).mean())
