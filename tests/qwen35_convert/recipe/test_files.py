"""Recipes that extend others, and every mistake of a recipe with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen35_convert.errors import RecipeError
from qwen35_convert.recipe.check import check_recipe
from qwen35_convert.recipe.files import bundled_recipes
from qwen35_convert.recipe.recipe import read_recipe


def written(folder: Path, text: str, name: str = "mine.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def mistakes(name: str) -> list[str]:
    """Return the mistakes as they are printed, without the folder."""
    return [str(one).removeprefix(str(Path(name).parent) + "/") for one in check_recipe(name)]


def test_a_recipe_extends_a_bundled_one_key_by_key(tmp_path):
    name = written(tmp_path, "extends: fp8-block\nquantize: {scale: float32}\nmtp: drop\n")
    mine, base = read_recipe(name), read_recipe("fp8-block")
    quantize = base.quantize.model_copy(update={"scale": "float32"})
    assert mine == base.model_copy(update={"name": "mine", "mtp": "drop", "quantize": quantize})


def test_the_resolved_recipe_is_plain_and_reads_as_itself(tmp_path):
    name = written(tmp_path, "extends: nvfp4-mixed\n")
    resolved = read_recipe(name).model_dump(mode="json")
    assert "extends" not in resolved
    assert resolved | {"name": "nvfp4-mixed"} == read_recipe("nvfp4-mixed").model_dump(mode="json")


def test_a_recipe_extends_a_file_beside_it_wherever_the_command_runs(tmp_path, monkeypatch):
    written(tmp_path, "extends: bf16-split\nname: base\nmtp: drop\n", "base.yaml")
    written(tmp_path, "extends: base.yaml\nverify: {level: structure}\n", "middle.yaml")
    name = written(tmp_path, "extends: middle.yaml\n")
    monkeypatch.chdir("/")
    recipe = read_recipe(name, ["export.max_shard_size=7"])
    assert (recipe.name, recipe.mtp, recipe.verify.level) == ("mine", "drop", "structure")
    assert (recipe.quantize.scheme, recipe.export.max_shard_size) == ("keep", 7)


def test_a_list_replaces_the_one_below(tmp_path):
    text = "extends: int4-mixed\nquantize:\n  rules:\n    - {match: mtp.*, scheme: keep}\n"
    rules = read_recipe(written(tmp_path, text)).quantize.rules
    assert [rule.match for rule in rules] == ["mtp.*"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: fp8-blok", "1:10: extends: 'fp8-blok' is neither .*, did you mean 'fp8-block'?"),
        ("mtp: drop\nextends: bsae.yaml", "2:10: extends: .* beside mine.yaml, did you mean 'base"),
        (
            "extends: zzzzzz",
            "1:10: extends: 'zzzzzz' is neither a bundled recipe nor a file beside",
        ),
        ("extends: ../base.yaml", "1:10: extends: '../base.yaml' is neither"),
        ("extends: [fp8-block]", "1:10: extends: expected a name, got list"),
        ("extends:", "1:9: extends: expected a name, got NoneType"),
        ("extends: mine.yaml", "1:10: extends goes round in a circle: mine.yaml -> mine.yaml"),
        ("extends: a.yaml", "a.yaml:1:10: .* circle: mine.yaml -> a.yaml -> mine.yaml"),
        ("extends: broken.yaml", "broken.yaml:1:10: not YAML"),
        (
            "extends: base.yaml\nmpt: drop",
            "mine.yaml:2:1: there is no key 'mpt', did you mean 'mtp'",
        ),
        ("extends: wrong.yaml\nmtp: keep", "wrong.yaml:1:9: layout: Input should be"),
        ("extend: fp8-block", "1:1: there is no key 'extend', did you mean 'extends'?"),
    ],
)
def test_what_cannot_be_extended_is_refused_where_it_stands(tmp_path, text, message):
    (tmp_path / "in").mkdir()
    written(tmp_path, "mtp: drop\n", "base.yaml")
    written(tmp_path / "in", "extends: mine.yaml\n", "a.yaml")
    written(tmp_path / "in", "mtp: drop\n", "base.yaml")
    written(tmp_path / "in", "layout: {", "broken.yaml")
    written(tmp_path / "in", "layout: txt", "wrong.yaml")
    with pytest.raises(RecipeError, match=message) as caught:
        read_recipe(written(tmp_path / "in", text))
    assert len(caught.value.mistakes) == 1


def test_a_mistake_in_a_replaced_list_is_told_of_the_list_that_counts(tmp_path):
    written(tmp_path, "quantize: {rules: [{match: mtp.*, scheme: keep}]}\n", "base.yaml")
    name = written(tmp_path, "extends: base.yaml\nquantize: {rules: [{match: a}]}\n")
    assert mistakes(name) == ["mine.yaml:2:20: quantize.rules.0.scheme: Field required"]


@pytest.mark.parametrize("name", bundled_recipes())
def test_bundled_recipes_have_no_mistake(name):
    assert check_recipe(name) == []


WRONG = """\
# ours
layuot: text
layout: text
vision: keep
mtp: no
quantize:
  scheme: fp9-block
  skale: pow2
  rules:
    - {match: "layers.*.linear_attn.in_proj_a", scheme: fp8-block}
    - {match: "layers.*.mlp.dwon_proj", scheme: fp8-chanel}
    - {match: "mtp.*", scheme: keep}
    - {match: "mtp.*", scheme: int4}
verify: {text: nowhere.txt, min_top1: 2}
"""


def test_every_mistake_is_told_in_its_place_and_in_order(tmp_path):
    told = mistakes(written(tmp_path, WRONG))
    assert [line.split(": ", 1)[0] for line in told] == [
        "mine.yaml:2:1",
        "mine.yaml:4:9",
        "mine.yaml:5:6",
        "mine.yaml:7:11",
        "mine.yaml:8:3",
        "mine.yaml:10:15",
        "mine.yaml:11:15",
        "mine.yaml:11:49",
        "mine.yaml:13:15",
        "mine.yaml:14:16",
        "mine.yaml:14:39",
    ]
    told.pop(1)
    assert "did you mean 'fp8-block'?" in told[2]
    assert "whose role in_proj_a is protected" in told[4]
    assert "matches no weight of the family" in told[5]
    assert "there is no file 'nowhere.txt'" in told[8]


@pytest.mark.parametrize(
    "rules",
    [
        "{match: 'layers.*.mlp.*', scheme: int4}",  # a dense model has no router
        "{match: 'mtp.*', scheme: keep}",
        "{match: 'visual.*', scheme: keep}",
        "{match: 'layers.3.self_attn.q_proj', scheme: int8}",
        "{match: 'layers.[0-3].mlp.experts.17.*', scheme: keep}",
        "{match: 'layers.*.linear_attn.in_proj_[ab]', scheme: keep}, "
        "{match: 'layers.*.linear_attn.in_proj_*', scheme: int8}",
        "{match: 'layers.0.*', scheme: keep}, {match: 'layers.*.mlp.down_proj', scheme: int8}",
        "{match: '*_proj', scheme: int8}",
    ],
)
def test_a_rule_that_some_model_has_a_weight_for_is_no_mistake(tmp_path, rules):
    assert mistakes(written(tmp_path, f"quantize: {{rules: [{rules}]}}\n")) == []


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("{match: output, scheme: q6_k}", "matches no weight"),
        ("{match: lm_head, scheme: q6_j}", "type 'q6_j' is not known, did you mean 'q6_k'?"),
        ("{match: '*.mlp.gate', scheme: q4_k}", "whose role router is protected"),
        ("{match: '*.A_log', scheme: q8_0}", "whose role A_log is protected"),
    ],
)
def test_rules_of_a_gguf_are_checked_by_its_types(tmp_path, rule, message):
    text = f"extends: gguf-q4_k_m\nquantize: {{rules: [{rule}]}}\n"
    (told,) = mistakes(written(tmp_path, text))
    assert message in told
    right = "extends: gguf-q4_k_m\nquantize: {rules: [{match: lm_head, scheme: Q6_K}]}\n"
    assert mistakes(written(tmp_path, right)) == []


def test_a_mix_that_is_not_known_is_told(tmp_path):
    (told,) = mistakes(written(tmp_path, "extends: gguf-q4_k_m\nquantize: {scheme: q4_k_x}\n"))
    assert told.startswith("mine.yaml:2:20: quantize.scheme: mix 'q4_k_x' is not known")


@pytest.mark.parametrize(
    ("text", "only"),
    [
        ("layout: hbu\nvision: keep\n", "1:9"),
        ("layout: txt\nvision: drop\nmtp: keep\n", "1:9"),
        ("quantize: {scheme: int4, method: gtpq, calibrate: {tokens: 99}}\n", "1:34"),
        ("export: {format: gufg}\nquantize: {scheme: q4_k_m, mix: llama.cpp}\n", "1:18"),
        (
            "export: {format: gguf}\nquantize: {scheme: q4_k_m, kv_cache: fp8, calibrate: {}}",
            "2:38",
        ),
    ],
)
def test_what_contradicts_a_mistake_is_no_second_one(tmp_path, text, only):
    (told,) = mistakes(written(tmp_path, text))
    assert told.startswith(f"mine.yaml:{only}: ")


def test_contradictions_are_all_told(tmp_path):
    text = "vision: keep\nquantize: {mix: llama.cpp}\nextra: 1\n"
    told = mistakes(written(tmp_path, text))
    assert [line.split(": ", 1)[0] for line in told] == [
        "mine.yaml:1:9",
        "mine.yaml:2:17",
        "mine.yaml:3:1",
    ]


def test_a_recipe_that_is_nowhere_is_one_mistake():
    (told,) = mistakes("nowhere.yaml")
    assert "neither bundled nor a file" in told
