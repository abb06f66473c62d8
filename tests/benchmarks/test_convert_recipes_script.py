"""The benchmark of recipes times what there is, and holds their bytes to each other."""

import pytest

import qwen35_convert as q
from benchmarks import convert_recipes


@pytest.mark.parametrize("what", convert_recipes.RECIPES)
def test_every_recipe_plans_as_it_is_timed(nano, what):
    name, *settings = convert_recipes.RECIPES[what]
    alike = [word for word in convert_recipes.ALIKE if "=" in word]
    assert q.plan(nano, name, overrides=[*alike, *settings]).recipe.layout == "text"


def test_other_bytes_in_another_round_are_no_result(tmp_path, monkeypatch):
    contents = iter([b"one", b"one", b"other"])

    def write(*_):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "model.safetensors").write_bytes(next(contents))
        return {"core_s": 1.0}

    monkeypatch.setattr(convert_recipes, "measure", write)
    with pytest.raises(AssertionError, match="int8: bytes differ"):
        convert_recipes.bench(tmp_path, ["int8"], 2, tmp_path / "out")
