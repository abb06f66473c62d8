"""Units of four-bit weights are multiplied across the threads of a warp."""

from __future__ import annotations

import pytest

from runtime.kernels.launch import HAS_TRITON
from tests.runtime.kernels.compiled import compiled_by

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed"),
    pytest.mark.all,  # seconds of compiling
]
KERNELS = {"_stream_kernel", "_strips_kernel", "_gated_kernel", "_down_kernel"}


def test_where_units_are_multiplied_number_n_is_in_thread_n():
    """Else a thread would multiply what belongs to another row: the compiler chooses layouts."""
    launches = compiled_by("linear.units_compiled")
    assert {kernel for kernel, *_ in launches} == KERNELS
    for _, threads, products in launches:
        in_order = (
            "#ttg.blocked<{sizePerThread = [1], threadsPerWarp = [32], "
            f"warpsPerCTA = [{threads // 32}], order = [0]}}>"
        )
        assert products
        assert all(product == [threads, in_order] for product in products)
