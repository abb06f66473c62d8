from __future__ import annotations

import pytest
import torch

from runtime.kernels.delta_rule.forward import substitute


@pytest.mark.parametrize("unknowns", [1, 2, 4, 5, 63, 64])
def test_it_solves_what_lapack_solves(unknowns):
    rng = torch.Generator().manual_seed(unknowns)
    L = torch.randn(3, unknowns, unknowns, generator=rng) / unknowns
    d = torch.randn(3, unknowns, 37, generator=rng)
    expected = torch.linalg.solve_triangular(
        L.double(), d.double(), upper=False, unitriangular=True
    )
    x = substitute(L, d.clone())
    assert (x - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_what_is_not_finite_stays_in_its_system_and_column():
    L, d = torch.zeros(2, 8, 8), torch.ones(2, 8, 3)
    d[1, 5, 2] = torch.nan
    broken = substitute(L, d).isnan().nonzero().tolist()
    assert broken == [[1, 5, 2], [1, 6, 2], [1, 7, 2]]
