"""Products of float32 matrices on a CPU: numpy's BLAS for many rows, torch's for few.

Chosen for: never alone; references and heads multiply with it.

torch's wheels bring MKL, which on AMD's cores leaves half of what they can do: 512 x 1024 by 1024 x
6144 at 86 GFLOP/s on one core of an EPYC, numpy's OpenBLAS at 179. On Intel's both are alike, on
macOS both are Accelerate.

Trap: OpenBLAS has threads of its own. `runtime.workers` limits them where pieces of work have one
core each.

Shape letters: M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Fewer rows read the weight once whoever multiplies, and numpy packs it first.
FEW = 16


def times_rows(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x @ weight.T [M, N], wherever they are and in whatever dtype they have."""
    many = x_MK.ndim == 2 and x_MK.shape[0] >= FEW
    if not many or x_MK.is_cuda or x_MK.dtype != torch.float32 or weight_NK.dtype != x_MK.dtype:
        return F.linear(x_MK, weight_NK)
    return torch.from_numpy(x_MK.detach().numpy() @ weight_NK.detach().numpy().T)
