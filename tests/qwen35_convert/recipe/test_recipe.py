"""Recipes: every default resolved, and every key, value or file that is wrong refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from qwen35_convert.errors import RecipeError
from qwen35_convert.recipe.files import (
    MAX_RECIPE_BYTES,
    bundled_recipes,
    find_recipe,
    headline,
)
from qwen35_convert.recipe.recipe import Recipe, build_recipe, read_recipe
from qwen35_convert.sizes import UNITS, parse_size


def written(folder: Path, text: str | bytes) -> str:
    path = folder / "mine.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def refused(name: str, match: str, *overrides: str) -> str:
    with pytest.raises(RecipeError, match=match) as caught:
        read_recipe(name, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", bundled_recipes())
def test_a_bundled_recipe_loads_and_says_what_it_is_for(name):
    recipe = read_recipe(name)
    assert recipe.name == name
    assert recipe.layout in ("text", "hub")
    assert recipe.vision == ("keep" if recipe.layout == "hub" else "drop")
    assert headline(name).endswith(".") or headline(name)[0].isupper()
    text = find_recipe(name).read_text()
    assert text.startswith("# ")
    assert "Size:" in text
    assert "error:" in text or "KL" in text


def test_a_bundled_recipe_resolves_to_plain_values():
    assert read_recipe("fp8-block").model_dump() == {
        "name": "fp8-block",
        "layout": "text",
        "experts": "split",
        "mtp": "keep",
        "vision": "drop",
        "only": None,
        "quantize": {
            "scheme": "fp8-block",
            "scale": "pow2",
            "group": None,
            "symmetric": None,
            "dialect": "compressed-tensors",
            "method": "nearest",
            "kv_cache": "none",
            "calibrate": None,
            "rules": (),
            "mix": "ours",
            "imatrix": None,
        },
        "export": {
            "format": "safetensors",
            "max_shard_size": 5_000_000_000,
            "chat_template": None,
            "metadata": None,
        },
        "verify": {"level": "tensors", "text": "default", "max_kl": None, "min_top1": None},
        "bench": {"prefill": (512, 8192), "batch": (1, 8, 64)},
    }


def test_an_empty_recipe_is_the_default():
    assert build_recipe({}).model_dump(exclude={"name"}) == read_recipe("fp8-block").model_dump(
        exclude={"name"}
    )


def test_a_file_is_a_recipe_named_after_it(tmp_path):
    recipe = read_recipe(written(tmp_path, "layout: same\nquantize: {scheme: keep}\n"))
    assert (recipe.name, recipe.layout, recipe.vision) == ("mine", "same", "keep")
    assert read_recipe(written(tmp_path, "name: other\n")).name == "other"


def test_rules_keep_their_order(tmp_path):
    text = (
        "quantize:\n  rules:\n    - {match: b.*, scheme: keep}\n    - {match: a.*, scheme: keep}\n"
    )
    rules = read_recipe(written(tmp_path, text)).quantize.rules
    assert [(rule.match, rule.scheme) for rule in rules] == [("b.*", "keep"), ("a.*", "keep")]


def test_a_method_that_reads_a_text_has_one():
    quantize = read_recipe("int4", ["quantize.method=gptq"]).quantize
    assert quantize.calibrate.model_dump() == {"text": "default", "tokens": 32768}
    quantize = read_recipe("int4", ["quantize.method=sweep", "quantize.calibrate.tokens=99"])
    assert quantize.quantize.calibrate.tokens == 99
    assert build_recipe(quantize.model_dump(mode="json")) == quantize


def test_an_fp8_cache_has_a_text_too():
    quantize = read_recipe("fp8-block-hub", ["quantize.kv_cache=fp8"]).quantize
    assert quantize.calibrate.model_dump() == {"text": "default", "tokens": 32768}
    assert quantize.calibrate.file is None
    assert quantize.chosen_by is None
    change = ["quantize.kv_cache=fp8", "quantize.calibrate.text=a.txt"]
    assert read_recipe("fp8-block-hub", change).quantize.calibrate.file == "a.txt"


def test_a_recipe_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        build_recipe({}).layout = "hub"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layuot: text", "there is no key 'layuot', did you mean 'layout'"),
        ("zzz: 1", "there is no key 'zzz', expected one of name, layout, experts"),
        ("imatrix: f", "there is no key 'imatrix', did you mean 'quantize.imatrix'"),
        ("max_kl: 0.1", "there is no key 'max_kl', did you mean 'verify.max_kl'"),
        ("export: {scheme: int4}", "no key 'export.scheme', did you mean 'quantize.scheme'"),
        ("quantize: {sheme: keep}", "no key 'quantize.sheme', did you mean 'scheme'"),
        ("export: {max_shard: 5GB}", "no key 'export.max_shard', did you mean 'max_shard_size'"),
        ("verify: {zzz: 1}", "no key 'verify.zzz', expected one of level"),
        (
            "quantize: {rules: [{match: a, scheme: keep}, {mach: a, scheme: keep}]}",
            "no key 'quantize.rules.1.mach', did you mean 'match'",
        ),
        (
            "quantize: {method: gptq, calibrate: {token: 5}}",
            "no key 'quantize.calibrate.token', did you mean 'tokens'",
        ),
        ("{1: text}", "Keys should be strings"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(tmp_path, text, message):
    refused(written(tmp_path, text), message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layout: txt", "layout: Input should be 'text', 'hub' or 'same'.*got 'txt'"),
        ("layout:", "layout: .*got None"),
        ("layout: [text]", "layout: "),
        ("experts: both", "experts: "),
        ("mtp: no", "mtp: .*got False"),
        ("vision: true", "vision: .*got True"),
        ("name: 5", "name: Input should be a valid string .got 5"),
        ("name: 2020-01-01", "name: Input should be a valid string"),
        ("quantize: fp8-block", "quantize: .*got 'fp8-block'"),
        ("quantize: {scale: fp32}", "quantize.scale: Input should be 'pow2', 'float32' or 'bfl"),
        ("quantize: {rules: {match: a}}", "quantize.rules: "),
        ("quantize: {rules: [a]}", "quantize.rules.0: "),
        ("quantize: {rules: [{match: a}]}", "quantize.rules.0.scheme: Field required"),
        ("quantize: {rules: [{match: 3, scheme: keep}]}", "quantize.rules.0.match: "),
        ("export: {format: zip}", "export.format: "),
        ("export: {max_shard_size: 5 apples}", "export.max_shard_size: '5 apples' is not a size"),
        ("export: {max_shard_size: -5}", "export.max_shard_size: .*greater than 0"),
        ("export: {max_shard_size: 0}", "export.max_shard_size: .*greater than 0"),
        ("export: {max_shard_size: 0GB}", "export.max_shard_size: .*greater than 0"),
        ("export: {max_shard_size: true}", "export.max_shard_size: "),
        ("export: {max_shard_size: 1.5}", "export.max_shard_size: "),
        ("export: {max_shard_size: .inf}", "export.max_shard_size: .*got inf"),
        ("verify: {level: logit}", "verify.level: "),
        ("quantize: {method: awq}", "quantize.method: Input should be 'nearest', 'sweep' or 'gpt"),
        ("quantize: {method: gptq, calibrate: {tokens: 1}}", "calibrate.tokens: .*greater than 1"),
        ("quantize: {method: gptq, calibrate: {tokens: 5.5}}", "calibrate.tokens: "),
        ("quantize: {method: gptq, calibrate: a.txt}", "quantize.calibrate: .*got 'a.txt'"),
        ("quantize: {method: gptq, calibrate: {text: 5}}", "calibrate.text: "),
        ("quantize: {calibrate: {tokens: 512}}", "quantize: calibrate is for method sweep or gptq"),
        ("quantize: {calibrate: {}}", "quantize: calibrate is for method sweep or gptq"),
        ('quantize: {imatrix: "a\\0b"}', "quantize.imatrix: .*holds a NUL"),
        ('verify: {level: logits, text: "a\\0b"}', "verify.text: .*holds a NUL"),
        ("quantize: {kv_cache: int8}", "quantize.kv_cache: Input should be 'none' or 'fp8'"),
        (
            "export: {format: gguf}\nquantize: {scheme: Q4_K_M, kv_cache: fp8}",
            "quantize.kv_cache is fp8, but export.format gguf has no place for scales",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(tmp_path, text, message):
    name = written(tmp_path, text)
    assert re.match(rf"{re.escape(name)}:\d+:\d+: \w", refused(name, message))


def test_every_wrong_key_is_told_at_once(tmp_path):
    name = written(tmp_path, "layout: x\nmtp: y\nzzz: 1\n")
    told = refused(name, "layout").splitlines()
    places = [line.removeprefix(name).split(": ")[0] for line in told]
    assert places == [":1:9", ":2:6", ":3:1"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layout: text\nvision: keep", "layout text has no vision"),
        ("layout: hub\nvision: drop", "layout hub names vision"),
    ],
)
def test_vision_and_layout_must_fit(tmp_path, text, message):
    name = written(tmp_path, text)
    assert refused(name, message).startswith(f"{name}:2:9: vision is ")


@pytest.mark.parametrize(
    ("layout", "vision"), [("text", "drop"), ("hub", "keep"), ("same", "keep")]
)
def test_vision_follows_the_layout_where_it_is_absent(layout, vision):
    assert build_recipe({"layout": layout}).vision == vision


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- layout\n", "1:1: expected keys and values, got list"),
        ("text", "1:1: expected keys and values, got str"),
        ("", "1:1: expected keys and values, got NoneType"),
        ("5", "1:1: expected keys and values, got int"),
        ("layout: {", "1:10: not YAML: while parsing a flow node, expected the node"),
        ("layout: text\n  mtp: keep", "2:6: not YAML: mapping values are not allowed"),
        ("layout: text\nlayout: hub", "2:1: duplicate key 'layout'"),
        ("quantize: {scale: pow2, scale: float32}", "1:25: duplicate key 'scale'"),
        ("layout: text\n---\nlayout: hub", "2:1: not YAML: expected a single document"),
        ("{[a]: b}", "1:2: not YAML: while constructing a mapping, found unhashable key"),
        ("layout: text\nname: \0", "2:7: not YAML: the character .*x00. is not allowed"),
        ("a: &x text\nb: *x", "1:4: not plain YAML: an anchor: write the value out"),
        ("layout: &x text", "1:9: not plain YAML: an anchor"),
        ("layout: *x", "1:9: not plain YAML: an alias: write .* quote it if it is a glob"),
        ("quantize: {rules: [{match: *.down_proj, scheme: keep}]}", "while scanning an alias"),
        ("layout: !!str text", "1:9: not plain YAML: a tag: write the plain value"),
        ("layout: !!python/object/apply:os.system [true]", "1:9: not plain YAML: a tag"),
        ("name: !x 5", "1:7: not plain YAML: a tag"),
        ("layout: text\nname: 2020-99-99", "2:7: not YAML: month must be in 1..12"),
        ("a: " + "[" * 60_000, "1:19: not plain YAML: nested over 16 deep"),
        ("".join(" " * i + "a:\n" for i in range(300)), "17:17: .* nested over 16 deep"),
        ("- " * 20_000, "1:33: not plain YAML: nested over 16 deep"),
        ("a: " + "9" * 5000, "1:4: not YAML: "),
        (b"layout: text\nmtp: \xff\xfe", "2:6: not UTF-8"),
        (b"#" * (MAX_RECIPE_BYTES + 1), f"has {MAX_RECIPE_BYTES + 1} bytes, over"),
    ],
)
def test_what_is_not_plain_yaml_is_refused_where_it_stands(tmp_path, text, message):
    name = written(tmp_path, text)
    assert refused(name, message).startswith(f"{name}:")


def test_values_that_double_at_every_level_cost_nothing(tmp_path):
    """Billion laughs: refused at its first anchor."""
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40)]
    refused(written(tmp_path, "\n".join(lines)), "an anchor")


@pytest.mark.parametrize(
    ("name", "near"),
    [("fp8-blok", "fp8-block"), ("bf16_split", "bf16-split"), ("fp8-chanel", "fp8-channel")],
)
def test_an_unknown_recipe_is_refused_with_the_nearest(name, near):
    assert f"known {', '.join(bundled_recipes())}" in refused(name, f"did you mean '{near}'")


@pytest.mark.parametrize("name", ["", "zzzzzz", ".", "/", "a\0b"])
def test_a_recipe_that_is_nowhere_near_is_refused(name):
    assert "did you mean" not in refused(name, "is neither bundled nor a file")


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("layout=same", lambda r: r.layout == "same"),
        ("quantize.scale=float32", lambda r: r.quantize.scale == "float32"),
        ("export.max_shard_size=200MB", lambda r: r.export.max_shard_size == 200_000_000),
        ("export.max_shard_size=7", lambda r: r.export.max_shard_size == 7),
        ("quantize.rules=[{match: a=b, scheme: c}]", lambda r: r.quantize.rules[0].match == "a=b"),
        ("quantize={scheme: keep}", lambda r: r.quantize.scheme == "keep"),
        ("verify.level='structure'", lambda r: r.verify.level == "structure"),
    ],
)
def test_a_flag_overrides_the_file(override, read):
    assert read(read_recipe("fp8-block", [override, "vision=drop"]))


def test_the_last_flag_wins():
    assert read_recipe("fp8-block", ["mtp=drop", "mtp=keep"]).mtp == "keep"


def test_a_flag_may_name_a_section_the_file_lacks(tmp_path):
    name = written(tmp_path, "layout: text\n")
    assert read_recipe(name, ["quantize.scheme=keep"]).quantize.scheme == "keep"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("layout", "--set 'layout', expected KEY=VALUE"),
        ("=text", "expected KEY=VALUE"),
        ("", "expected KEY=VALUE"),
        ("layuot=text", "did you mean 'layout'"),
        ("quantize.sheme=keep", "did you mean 'scheme'"),
        ("layout.deep=1", "layout is a value, not a section"),
        ("quantize.rules.0.scheme=keep", "quantize.rules: Input should be"),
        ("layout=", "layout: .*got None"),
        ("layout=hub", "fp8-block.yaml:7:9: vision is drop, but layout hub names vision"),
        ("vision=keep", "--set vision: vision is keep, but layout text has no vision"),
        ("layout={", "--set layout: not YAML: "),
        ("layout=*x", "--set layout: not plain YAML: an alias"),
        ("quantize.rules=[{match: a}]", "rules.0.scheme: Field required"),
        ("..=1", "there is no key ''"),
    ],
)
def test_a_wrong_flag_is_refused(override, message):
    refused("fp8-block", message, override)


def test_overrides_leave_the_given_values_alone():
    values = {"quantize": {"scheme": "fp8-block"}}
    assert build_recipe(values, ["quantize.scheme=keep"]).quantize.scheme == "keep"
    assert values == {"quantize": {"scheme": "fp8-block"}}


@given(st.integers(0, 10**12), st.sampled_from(sorted(UNITS)), st.sampled_from(["", " ", "  "]))
def test_a_whole_size_is_exact_in_any_spelling(count, unit, space):
    for spelling in (unit, unit.lower(), unit.capitalize()):
        assert parse_size(f"{space}{count}{space}{spelling}{space}") == count * UNITS[unit]


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("0.5 GB", 5 * 10**8), ("1GiB", 2**30), ("1.5kb", 1500), ("12", 12)],
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GB",
        "-5GB",
        "5 apples",
        "5GBB",
        "1e9",
        ".5GB",
        "5.",
        "0x10",
        "inf",
        "nan",
        "9" * 400 + "GB",
        "\u0665GB",
        "5 G B",
    ],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@given(
    layout=st.sampled_from(["text", "hub", "same"]),
    experts=st.sampled_from(["split", "fused", "same"]),
    mtp=st.sampled_from(["keep", "drop"]),
    scale=st.sampled_from(["pow2", "float32", "bfloat16"]),
)
def test_a_resolved_recipe_resolves_to_itself(layout, experts, mtp, scale):
    values = {"layout": layout, "experts": experts, "mtp": mtp, "quantize": {"scale": scale}}
    recipe = build_recipe(values)
    assert Recipe.model_validate(recipe.model_dump()) == recipe
