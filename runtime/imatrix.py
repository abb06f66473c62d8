"""An importance matrix: the squares of every linear's inputs, summed over a text.

    in_sum2_k = sum over tokens of x_k^2         counts = how many tokens reached the weight

The forward pass is float32, sums are float64. Weights with one input share a row: q, k, v; gate,
up; the four of the delta rule. Rows are keyed by our names and in the hub's order of columns. GGUF
tiles the value heads along the columns of out_proj, so its row must be tiled as well:
`Imatrix.row` takes the order.

The head's row is the input of `lm_head`, or of `embed_tokens` if it is tied.

Source: llama.cpp's tools/imatrix/imatrix.cpp, whose sums are the same but in float32.

Shape letters: T packed tokens, E experts, K columns of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from formats.checkpoint import Checkpoint
from runtime.layerwise import Progress, observe_all
from runtime.workers import Workers


@dataclass
class Imatrix:
    """Sums [K] float64 and counts by our names; `tokens` of the text."""

    tokens: int
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def observe(self, names: Sequence[str], x_TK: Tensor) -> None:
        """Add the squares of an input that the named weights share."""
        squares = x_TK.double().square().sum(0).cpu()
        for name in names:
            before = self.sums.get(name)
            self.sums[name] = squares if before is None else before + squares
            self.counts[name] = self.counts.get(name, 0) + len(x_TK)

    @property
    def unseen(self) -> list[str]:
        """Return the experts, as `layers.3.mlp.experts.7`, that no token reached: sums of zero."""
        names = (name.rpartition(".")[0] for name, count in self.counts.items() if not count)
        return list(dict.fromkeys(names))

    def row(self, name: str, order: Tensor | None = None) -> tuple[Tensor, int]:
        """Return sums [K] and count of a weight; `order` says which column comes to each place."""
        sums = self.sums[name]
        return (sums if order is None else sums[order]), self.counts[name]

    def stacked(
        self,
        naming: Callable[[str], tuple[str, int | None]],
        order: Callable[[str], Tensor | None] = lambda _: None,
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return (in_sum2 [E, K], counts [E]) float32 by the names of a file that stacks experts.

        naming  from our name to the file's, and the place if it is an expert's
        order   from our name to the order of its columns, if the file has another
        """
        parts: dict[str, list[tuple[int, Tensor, int]]] = {}
        for name in self.sums:
            stack, index = naming(name)
            parts.setdefault(stack, []).append((index or 0, *self.row(name, order(name))))
        return {stack: _stack(rows) for stack, rows in parts.items()}


def _stack(rows: list[tuple[int, Tensor, int]]) -> tuple[Tensor, Tensor]:
    rows.sort(key=lambda row: row[0])
    assert [row[0] for row in rows] == list(range(len(rows))), "experts of a stack are numbered"
    counts = torch.tensor([float(row[2]) for row in rows])
    return torch.stack([row[1] for row in rows]).float(), counts


def collect(
    checkpoint: Checkpoint,
    texts: Sequence[Tensor],
    *,
    device: torch.device | str = "cpu",
    progress: Progress = lambda _: None,
) -> Imatrix:
    """Return what a text's tokens bring to every linear, the MTP head's too.

    texts  token ids [T] of texts of their own, each of 2 at least; all are held, T*H float32

    FormatError if the checkpoint has problems, RequestError for ids outside its vocabulary.
    """
    imatrix = Imatrix(sum(len(ids) for ids in texts))
    with Workers(device) as workers:
        observe_all(checkpoint, texts, imatrix, workers=workers, progress=progress)
    return imatrix
