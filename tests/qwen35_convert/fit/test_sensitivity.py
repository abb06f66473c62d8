"""`qwen35 sensitivity`: what its table says, and how near its predictions come."""

from __future__ import annotations

import json
import shutil

import pytest

import qwen35_convert as q
from quant.opening import open_value
from qwen35_convert.containers.registry import open_checkpoint
from qwen35_convert.fit.probes import Probes
from qwen35_convert.fit.rounded import Rounder
from qwen35_convert.fit.sensitivity import read_sensitivity
from qwen35_convert.fit.sizes import sizes_of
from runtime.imatrix import collect
from tests.checkpoints import moe
from tests.qwen35_convert.command import called

FORMS = ("q4_0", "q4_k", "q8_0", "bf16")
SHORT = q.Question(chunks=1, forms=FORMS)
FOLDER = ("int4", "fp8-block", "keep")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("The importance of a column is what its inputs are worth. " * 12)
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory, nano_path, text):
    out = tmp_path_factory.mktemp("table") / "s.json"
    return q.sensitivity(nano_path, out, question=q.Question(str(text), 1, FORMS)), out


def test_the_table_has_each_form_of_each_unit(table, nano_path, text):
    values = json.loads(table[1].read_bytes())
    assert values["schema"] == "qwen35-sensitivity"
    assert values["text"]["name"] == text.name
    assert values["source"]["files"]["config.json"]["sha256"]
    assert str(nano_path) not in table[1].read_text()
    forms = values["units"]["blk.0.ffn_down.weight"]["forms"]
    assert set(forms) == {"q4_0", "q8_0", "bf16"} | ({"q4_k"} & forms.keys())
    for unit in values["units"].values():
        kls = {form: entry["kl"] for form, entry in unit["forms"].items()}
        assert kls["bf16"] == 0.0
        assert 0.0 < kls["q8_0"] < kls.get("q4_0", 1.0)
    assert not any(name.startswith("nextn") for name in values["units"])


def test_the_same_question_gives_the_same_bytes(table, tmp_path, nano_path, text):
    again = tmp_path / "again.json"
    q.sensitivity(nano_path, again, question=q.Question(str(text), 1, FORMS),
                  options=q.RunOptions(workers=1))  # fmt: skip
    assert again.read_bytes() == table[1].read_bytes()


def test_a_probe_is_the_kl_of_the_artifact(table, tmp_path, nano_path, text):
    """What is rounded in memory predicts what the converted file does."""
    made, out = table[0], tmp_path / "m.gguf"
    kind = "mlp.down_proj"
    probe = next(one for one in made.values["probes"] if one["weights"] == kind)
    rule = f"{{match: 'layers.*.{kind}', scheme: {probe['forms'][kind]}}}"
    overrides = ["quantize.scheme=bf16", f"quantize.rules=[{rule}]", "mtp=drop"]
    q.convert(nano_path, out, "gguf-q8_0", q.RunOptions(verify=False), overrides=overrides)
    report = q.verify(out, nano_path, level="logits", logits=q.LogitsCheck(str(text), max_kl=1.0))
    assert report.logits["kl_mean"] == pytest.approx(probe["kl"], rel=0.02)


def test_predictions_of_a_mix_are_near_what_is_measured(table, tmp_path, nano_path, text):
    source, recipe = open_checkpoint(nano_path), q.read_recipe("gguf-q8_0")
    sizes = sizes_of(source, recipe, tmp_path / "m.gguf", FORMS)
    mix = {unit.name: sorted(unit.sizes)[i % 2] for i, unit in enumerate(sizes.units)}
    predicted = sum(table[0].cost(unit, mix[unit.name]) for unit in sizes.units)
    rows = ids_of(source, text)
    rounder = Rounder(source, recipe, collect(source, list(rows)))
    forms = {i.atom.name: (i, mix[unit.name]) for unit in sizes.units for i in unit.items}
    measured = Probes(source, rounder, rows, "cpu", tmp_path).kl(forms)
    assert measured == pytest.approx(predicted, rel=0.35)


def ids_of(source, text):
    from qwen35_convert.verification.logits import token_rows

    return token_rows(source, str(text))[:1]


@pytest.fixture(scope="module")
def experts(tmp_path_factory, nano_path):
    folder = moe(tmp_path_factory.mktemp("moe") / "moe", linear_key_head_dim=128, vocab_size=2048)
    shutil.copy(nano_path / "tokenizer.json", folder)
    return folder


def test_folders_have_schemes_by_fused_group(tmp_path, experts, text):
    question = q.Question(str(text), 1, FOLDER)
    made = q.sensitivity(experts, tmp_path / "s.json", "fp8-block", question)
    units = made.values["units"]
    assert any(len(unit["weights"]) > 1 for unit in units.values())
    for unit in units.values():
        forms = unit["forms"]
        assert forms["keep"]["kl"] == 0.0 == forms["keep"]["error"]
        if {"int4", "fp8-block"} <= forms.keys() and forms["int4"]["error"]:
            assert forms["fp8-block"]["kl"] < forms["int4"]["kl"]


@pytest.mark.all
def test_types_that_need_an_importance_need_the_recipes_imatrix(tmp_path, nano_path, text):
    question = q.Question(str(text), 1, ("iq2_s", "q4_0", "q8_0"))
    without = q.sensitivity(nano_path, tmp_path / "a.json", question=question)
    assert not known(without, "ffn")
    matrix = tmp_path / "i.gguf"
    q.imatrix(nano_path, matrix, text=str(text), chunks=1)
    with_one = q.sensitivity(nano_path, tmp_path / "b.json", question=question,
                             overrides=[f"quantize.imatrix={matrix}"])  # fmt: skip
    before, after = ({n: u["forms"] for n, u in one.values["units"].items()}
                     for one in (without, with_one))  # fmt: skip
    weighed = [n for n in before if ".ffn_" in n]
    assert (
        sum(after[n]["q4_0"]["error"] < before[n]["q4_0"]["error"] for n in weighed)
        > len(weighed) / 2
    )


def known(made, part):
    return [n for n, u in made.values["units"].items() if part in n and "iq2_s" in u["forms"]]


def test_the_error_is_what_the_outputs_change_by(nano_path, text):
    """Columns that are independent: with one token, and one column that is not zero."""
    source, recipe = open_checkpoint(nano_path), q.read_recipe("gguf-q8_0")
    rows = ids_of(source, text)
    rounder = Rounder(source, recipe, collect(source, list(rows)))
    plan = q.plan(nano_path, recipe, "m.gguf")
    item = next(i for i in plan.items if i.atom.name == "layers.1.mlp.up_proj")
    value = open_value(source, item.atom)
    whole = value.exact(0, value.shape[0]).double()
    rounded = rounder.rounded(value, item, "q4_0")
    change = rounded.exact(0, value.shape[0]).double() - whole
    squares = rounder.imatrix.sums[item.atom.name] / rows.numel()
    assert rounder.error(item, "q4_0") == pytest.approx(float((change.square() @ squares).sum()))


def test_an_existing_file_is_not_replaced(table, nano_path):
    with pytest.raises(q.OutputError, match="exists"):
        q.sensitivity(nano_path, table[1], question=SHORT)
    with pytest.raises(q.OutputError, match="file of the source"):
        q.sensitivity(nano_path, nano_path / "config.json", question=SHORT)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "cannot be read"),
        ('{"schema": "other"}', "expected qwen35-sensitivity 2"),
        ('{"schema": "qwen35-sensitivity", "schema_version": 1, "units": {}}', "expected"),
        (
            '{"schema": "qwen35-sensitivity", "schema_version": 2, "units":'
            ' {"a": {"elements": 1, "forms": {"q8_0": {"kl": -1}}}}}',
            "no number of nats",
        ),
        (
            '{"schema": "qwen35-sensitivity", "schema_version": 2, "units":'
            ' {"a": {"elements": 1, "forms": {"q8_0": {"kl": 1' + 400 * "0" + "}}}}}",
            "no number of nats",
        ),
        (
            '{"schema": "qwen35-sensitivity", "schema_version": 2, "units": {}, "recipe": 5}',
            "does not say its recipe",
        ),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, content, why):
    path = tmp_path / "s.json"
    path.write_text(content)
    with pytest.raises(q.RecipeError, match=why):
        read_sensitivity(path)


def test_the_command(golden, tmp_path, nano_path, text):
    golden("help-sensitivity.txt", called("sensitivity", "--help").stdout)
    out = tmp_path / "s.json"
    words = ("--text", text, "--chunks", "1", "--forms", "q4_0,q8_0", "-q")
    done = called("sensitivity", nano_path, "-o", out, *words)
    assert done.returncode == 0, done.stderr
    assert "mlp.down_proj" in done.stdout
    assert out.is_file()
    unknown = called("sensitivity", nano_path, "-o", tmp_path / "t.json", "--forms", "q9_z")
    assert unknown.returncode == 2
    assert "q9_z" in unknown.stderr
    of_files = ("--recipe", "fp8-block", "--forms", "q8_0")
    other = called("sensitivity", nano_path, "-o", tmp_path / "a/t.json", *of_files)
    assert other.returncode == 2
    assert "a form of a weight in safetensors" in other.stderr
    assert called("sensitivity", nano_path, "-o", out, "--forms", ",").returncode == 2
    assert not (tmp_path / "a").exists()
