"""What errors in the rows of an embedding come to, in the form in which inputs of linears say it.

    H = R^T R            for the linears R that read the rows first, see `runtime.stream`
    H = that + X^T X     if it is the head, too, with inputs X; each over the mean of its diagonal

Rows go into the residual stream as they are, and a token that is looked up often is predicted
often: so of each row both uses count alike. Layers run on the embedding as it is stored, so it is
encoded before the first one; inputs of the head are therefore those of the source, which is run
once more for them.

On nano-dense, whose head is tied, the KL of an embedding in Q4_0 is 0.70 of that of nearest codes;
with either sum alone 0.76 and 0.82.

Shape letters: T tokens, H hidden size.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from qwen35_convert.planning.calibrated import EMBEDDING

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.hessian import Sums
    from runtime.layerwise import Walk


def embedding_sums(walk: Walk) -> Sums:
    """Return what is known of a source's embedding, [H, H], as of an input with as many tokens."""
    import torch

    from runtime.hessian import Sums
    from runtime.stream import embedding_gram, even

    gram = embedding_gram(walk)
    if walk.head == EMBEDDING:
        x_TH = _inputs_of_head(walk)
        gram = even(gram, x_TH.T @ x_TH)
    if not gram.any():  # nothing reads it: errors in all columns are alike
        gram = torch.eye(len(gram), device=gram.device)
    return Sums((EMBEDDING,), gram, len(gram))


def _inputs_of_head(walk: Walk) -> Tensor:
    """Return the inputs of the head [T, H]: all layers are run, and nobody looks at them."""
    from runtime.layerwise import Walk

    alone = Walk(walk.loader, walk.texts, walk.workers)
    return alone.hidden(deque(alone.residuals(), maxlen=1).pop())
