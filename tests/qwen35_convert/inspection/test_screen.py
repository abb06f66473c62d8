"""What `inspect` shows of a model: one screen, whatever the model is."""

from __future__ import annotations

import pytest

import qwen35_convert as q
from qwen35_convert.inspection.screen import lines
from tests.checkpoints import dense, moe


def test_the_screen_of_the_bundled_model(golden, nano, monkeypatch):
    monkeypatch.chdir(nano.parent)
    golden("inspect.txt", "\n".join(lines(q.inspect(nano.name))) + "\n")


@pytest.mark.parametrize("make", [dense, moe])
def test_every_model_fits_on_one_screen(make, tmp_path):
    shown = list(lines(q.inspect(make(tmp_path / "in"))))
    assert len(shown) <= 20
    assert any(line.startswith("experts") for line in shown) == (make is moe)


def test_a_rope_of_another_kind_is_named(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    rope = {"rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
    source = dense(tmp_path / "in", rope_parameters=rope | scaling)
    assert "rope        yarn, theta 10000000, 0.25 of a head rotated" in list(
        lines(q.inspect(source))
    )
