"""The upper Cholesky factor U of the inverse of a damped matrix H: U^T U = H^-1.

With J the reversal of order, J H J = L L^T gives H = R R^T for the upper triangular R = J L J, and
U = R^-1: one Cholesky step and one triangular inverse.

Shape letters: K rows and columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def upper_of_inverse(matrix_KK: Tensor, order: Tensor, added: float) -> Tensor | None:
    """Return the upper factor of the inverse of a damped matrix in an order, float64; None: none.

    A column whose diagonal is 0 stands alone.
    """
    lower = _cholesky(matrix_KK, order.flip(0), added)
    return None if lower is None else _inverse(lower).flip(0, 1)


def _cholesky(hessian_KK: Tensor, order: Tensor, added: float) -> Tensor | None:
    """Return the lower factor of the damped Hessian in this order, float64; None if it has none."""
    import torch

    ordered = hessian_KK[order][:, order].double()
    diagonal = ordered.diagonal()
    diagonal += torch.where(diagonal > 0, added, 1.0)
    lower, failed = torch.linalg.cholesky_ex(ordered)
    return None if int(failed) else lower


def _inverse(lower: Tensor) -> Tensor:
    """Return the inverse of a lower triangular matrix."""
    import torch

    one = torch.eye(len(lower), dtype=lower.dtype, device=lower.device)
    inverse: Tensor = torch.linalg.solve_triangular(lower, one, upper=False)
    return inverse
