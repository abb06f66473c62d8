"""Products of float32 matrices on a CPU: oneDNN's or numpy's for many rows, MKL's for few.

Chosen for: never alone; references and heads multiply with it.

torch's wheels bring MKL, which torch multiplies with, and oneDNN. On one core of an EPYC whose
other one was as busy, 512 rows of 1024 by 6144 columns: MKL 78 GFLOP/s, numpy's OpenBLAS 89, oneDNN
103. It was measured with AVX-512, and is taken there alone. On macOS torch and numpy have
Accelerate.

Traps: OpenBLAS and oneDNN have threads of their own. `runtime.workers` limits them where pieces of
work have one core each. A program that allows torch less than float32 allows oneDNN the same.

Shape letters: M rows of x, N outputs, K inputs.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

# Fewer rows read the weight once whoever multiplies, and numpy packs it first.
FEW = 16
WHOLE = "none", "ieee"  # what says of oneDNN's products that float32 is meant


def times_rows(x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """Return x @ weight.T [M, N], wherever they are and in whatever dtype they have."""
    many = x_MK.ndim == 2 and x_MK.shape[0] >= FEW
    if not many or x_MK.is_cuda or x_MK.dtype != torch.float32 or weight_NK.dtype != x_MK.dtype:
        return F.linear(x_MK, weight_NK)
    x_MK, weight_NK = x_MK.detach(), weight_NK.detach()
    if _has_onednn() and _precision() in WHOLE:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x_MK, weight_NK, None, "none", [], "")
        return product
    return torch.from_numpy(x_MK.numpy() @ weight_NK.numpy().T)


@cache
def _has_onednn() -> bool:
    """Whether this torch has oneDNN's product, and this CPU is of the kind it was measured on."""
    there = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return there and torch.backends.cpu.get_cpu_capability() == "AVX512"


def _precision() -> str | None:
    """Return what this program asks of oneDNN's products; None: this torch does not say."""
    products = getattr(torch.backends.mkldnn, "matmul", None)
    return getattr(products, "fp32_precision", None)
