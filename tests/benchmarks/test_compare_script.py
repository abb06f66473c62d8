"""The benchmark of comparisons runs what it says: each recipe alone, then all together."""

from __future__ import annotations

import importlib
from argparse import Namespace

import pytest


@pytest.fixture
def compare():
    return importlib.import_module("benchmarks.compare")


def test_each_recipe_is_run_alone_and_then_all_together(compare, monkeypatch, tmp_path):
    ran = []

    def measure(*command):
        ran.append(next(word for word in command if word in ("convert", "verify", "compare")))
        (tmp_path / "out").mkdir(exist_ok=True)
        return {"core_s": 2.0 if ran[-1] != "compare" else 6.0, "rss_mb": 1.0}

    monkeypatch.setattr(compare, "measure", measure)
    source, text = tmp_path / "source", tmp_path / "text"
    text.write_text("some")
    recipes = ["int4", "int8", "fp8-block"]
    found = compare.run(tmp_path, Namespace(source=source, text=text, recipes=recipes))
    assert ran == ["convert", "verify"] * 3 + ["compare"]
    assert found["ratio"] == 0.5
    assert found["alone_core_s"] == dict.fromkeys(recipes, 4.0)
