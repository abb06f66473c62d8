"""Which tiles a product is cut into."""

from __future__ import annotations

import pytest

from runtime.kernels.waves import HEIGHT, MULTIPROCESSORS, best_width, fills, fits, steps

PROMPTS = (257, 300, 512, 1000, 2048, 8192)
OUTPUTS = (128, 2048, 5120, 14336, 34816)


def test_a_hundred_and_sixty_tiles_take_two_waves_and_larger_ones_one():
    assert steps(512, 5120, 128) == 2 * 128
    assert steps(512, 5120, 160) == 160
    assert best_width(512, 5120) == 160
    assert fits(512, 5120)
    assert not fits(1024, 5120)


@pytest.mark.parametrize("rows", PROMPTS)
@pytest.mark.parametrize("n", OUTPUTS)
def test_steps_cover_all_outputs_and_no_wave_is_empty(rows, n):
    for width in (128, 160, 192):
        heights = -(-rows // HEIGHT)
        most = steps(rows, n, width)
        assert most * MULTIPROCESSORS >= heights * n
        assert (most - width) * MULTIPROCESSORS < heights * (n + width)


@pytest.mark.parametrize("n", [5120, 14336, 16384, 34816])
def test_long_prompts_have_so_many_tiles_that_the_last_wave_counts_for_little(n):
    assert not fits(8192, n)


@pytest.mark.parametrize(
    ("rows", "n", "used"), [(512, 7168, 112), (640, 7168, 140), (8192, 7168, 1792)]
)
def test_gated_tiles_fill_the_multiprocessors_to_four_fifths(rows, n, used):
    waves = -(-used // MULTIPROCESSORS)
    assert fills(rows, n) == (used / (waves * MULTIPROCESSORS) >= 0.8)
    assert fills(rows, n) == (rows != 640)
