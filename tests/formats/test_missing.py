"""Which path is offered for one that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from formats.missing import missing, near


@pytest.fixture
def models(tmp_path):
    for name in ("Qwen3.5-9B", "Qwen3.5-27B"):
        (tmp_path / name / "bf16").mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("lost", "there"),
    [
        ("Qwen3.5-9b", "Qwen3.5-9B"),
        ("Qwen3_5-27B/bf16", "Qwen3.5-27B/bf16"),
        ("Qwen3.5-9B/bf-16", "Qwen3.5-9B/bf16"),
        ("Qwen3.5", "Qwen3.5-27B"),  # of two the first by name
        ("Qwen3.5-9b/fp8", None),
        ("llama", None),
        ("a" * 300 + "/x", None),
    ],
)
def test_one_name_may_be_spelt_otherwise(models, lost, there):
    assert near(models / lost) == (there and models / there)


@pytest.mark.parametrize("name", ["x", "x/y.yaml"])
def test_nothing_is_offered_where_nobody_may_look(tmp_path, monkeypatch, name):
    """A folder without the right to search it: each look below it is an error."""
    look = Path.stat

    def refused(path, **how):
        if tmp_path / "closed" in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return look(path, **how)

    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(Path, "stat", refused)
    assert near(tmp_path / "closed" / name) is None
    assert "does not exist" in str(missing(tmp_path / "closed" / name, "a folder"))


def test_a_current_folder_that_may_not_be_searched_offers_nothing(monkeypatch):
    def refused(path, **_how):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refused)
    assert near(Path("a/b")) is None
