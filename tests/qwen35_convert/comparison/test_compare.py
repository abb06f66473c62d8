"""`qwen35 compare`: recipes and artifacts beside one source, which runs once."""

from __future__ import annotations

import csv
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from formats.errors import FormatError
from qwen35_convert import api, measuring
from qwen35_convert.comparison import measure
from qwen35_convert.comparison.result import Entry
from qwen35_convert.errors import OutputError, RecipeError
from qwen35_convert.options import Limit
from qwen35_convert.run import memory
from qwen35_convert.text.tokens import DEFAULT_TEXT
from qwen35_convert.verification.logits import LogitsCheck
from qwen35_convert.write import digests
from qwen35_convert.write.receipt import dump_json
from tests.checkpoints import dense
from tests.qwen35_convert.command import called

QUIET = api.RunOptions(workers=1)
SWEPT = ("fp8-block", "gguf-q8_0", "int4", "bf16-split")
NO_PROOF = api.RunOptions(verify=False, workers=1)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(DEFAULT_TEXT.read_text()[:2400])
    return str(path)


@pytest.fixture(scope="module")
def swept(nano_path, text, tmp_path_factory):
    """What the command leaves and prints for these recipes."""
    folder = tmp_path_factory.mktemp("swept")
    recipes = [word for name in SWEPT for word in ("--recipe", name)]
    files = ["--html", folder / "page.html", "--csv", folder / "table.csv"]
    done = called("compare", nano_path, *recipes, "--text", text, *files, "--json", "-q")
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def test_every_recipe_is_measured_and_nothing_else_stays(swept, nano_path):
    folder, told = swept
    assert sorted(path.name for path in folder.iterdir()) == ["page.html", "table.csv"]
    assert told["schema_version"] == 1
    assert told["passed"] is True
    assert told["source"]["name"] == nano_path.name
    by_name = {one["name"]: one for one in told["artifacts"]}
    assert [*by_name] == ["int4", "gguf-q8_0", "fp8-block", "bf16-split"]
    sizes = [one["model_bytes"] for one in told["artifacts"]]
    assert sizes == sorted(sizes)
    assert 0 < by_name["gguf-q8_0"]["kl_mean"] < by_name["fp8-block"]["kl_mean"]
    assert by_name["fp8-block"]["kl_mean"] < by_name["int4"]["kl_mean"]
    assert by_name["bf16-split"]["kl_mean"] == 0
    assert [one["frontier"] for one in told["artifacts"]] == [True, True, False, True]


def test_the_csv_holds_what_the_json_does(swept):
    folder, told = swept
    with (folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["kl_mean"] for row in rows] == [str(one["kl_mean"]) for one in told["artifacts"]]


@pytest.mark.parametrize("recipe", ["fp8-block", "gguf-q8_0", "int4", "bf16-split"])
def test_figures_are_those_of_a_run_alone(swept, nano_path, text, tmp_path, recipe):
    """To the last digit: the source's streams and logits are kept, not rounded."""
    _, told = swept
    out = tmp_path / ("out.gguf" if recipe.startswith("gguf") else "out")
    api.convert(nano_path, out, recipe, NO_PROOF)
    alone = api.verify(out, nano_path, level="logits", logits=LogitsCheck(text))
    (one,) = (one for one in told["artifacts"] if one["name"].removesuffix(".gguf") == recipe)
    assert alone.logits is not None
    assert alone.logits["kl_mean"] == one["kl_mean"]
    entry = Entry(one["name"], alone, recipe, frontier=one["frontier"])
    assert json.loads(dump_json(entry.as_dict())) == one


def test_the_source_runs_once_and_artifacts_stand_beside_recipes(
    nano_path, text, tmp_path, layers_read
):
    api.convert(nano_path, tmp_path / "mine", "fp8-block", NO_PROOF)
    cache = tmp_path / "cache"
    folders = measuring.Folders(tmp_path / "work", cache=cache)
    found = measuring.compare(
        nano_path, ["gguf-q8_0"], [tmp_path / "mine"], text=text, folders=folders, options=QUIET
    )
    assert {one.name: one.recipe for one in found.entries} == {
        "gguf-q8_0": "gguf-q8_0",
        "mine": None,
    }
    assert layers_read.count(nano_path.name) == 4
    assert len(layers_read) == 12
    assert list((tmp_path / "work").iterdir()) == []
    assert len(list(cache.iterdir())) == 1


def test_every_file_is_hashed_once(nano_path, text, tmp_path, monkeypatch):
    hashed, original = [], digests.sha256_file

    def spy(path, stop=None):
        hashed.append(path)
        return original(path, stop)

    monkeypatch.setattr(digests, "sha256_file", spy)
    folders = measuring.Folders(tmp_path)
    found = measuring.compare(
        nano_path, ["fp8-block", "int4"], text=text, folders=folders, options=QUIET
    )
    assert found.passed
    assert len(hashed) == len(set(hashed))
    assert {path.parent for path in hashed} > {nano_path}


def test_a_limit_of_memory_refuses_at_once_or_not_at_all(
    nano_path, text, tmp_path, monkeypatch, layers_read
):
    """What a pass over the text loads stays in the process, and counts when the next is made.

    Verifying needs more than the first conversion, so that is no reason to begin.
    """
    monkeypatch.setattr(memory, "resident", lambda: (900 if layers_read else 400) * 10**6)
    made, convert = [], measure.convert_checkpoint
    monkeypatch.setattr(
        measure, "convert_checkpoint", lambda *a, **k: made.append(a) or convert(*a, **k)
    )

    def swept(megabytes):
        limit = Limit(megabytes * 10**6)
        options = api.RunOptions(workers=1, memory_limit=limit)
        folders, recipes = measuring.Folders(tmp_path), ["int8", "bf16-split"]
        return measuring.compare(nano_path, recipes, text=text, folders=folders, options=options)

    for least in (420, 475):
        with pytest.raises(RecipeError, match=f"--memory-limit is {least} MB"):
            swept(least)
        assert not layers_read
        assert not made
    assert swept(520).passed


def test_artifacts_of_recipes_are_kept_on_request(nano_path, text, tmp_path):
    keep = tmp_path / "kept"
    folders = measuring.Folders(tmp_path, keep)
    recipes = ["fp8-block", "gguf-q8_0"]
    measuring.compare(nano_path, recipes, text=text, folders=folders, options=QUIET)
    names = {path.name for path in keep.iterdir()}
    assert names == {"fp8-block", "gguf-q8_0.gguf", "gguf-q8_0.gguf.receipt.json"}
    receipt = json.loads((keep / "fp8-block" / "qwen35-receipt.json").read_text())
    assert receipt["verdict"]["passed"] is True
    with pytest.raises(OutputError, match="fp8-block exists"):
        measuring.compare(nano_path, recipes, text=text, folders=folders, options=QUIET)


def test_a_wrong_artifact_fails_the_comparison_and_is_on_the_page(nano_path, text, tmp_path):
    api.convert(nano_path, tmp_path / "right", "int4", NO_PROOF)
    shutil.copytree(tmp_path / "right", tmp_path / "wrong")
    (weights,) = (tmp_path / "wrong").glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-4000:] = content[-8000:-4000]
    weights.write_bytes(content)
    names = [tmp_path / "right", tmp_path / "wrong"]
    page = tmp_path / "page.html"
    done = called("compare", *names, "--against", nano_path, "--text", text, "--html", page, "-q")
    assert done.returncode == 1
    assert "FAILED: wrong: " in done.stdout
    assert "Not verified" in page.read_text()


def broken(path, what):
    """Break a copy of an artifact: NaN in its scales, or another tokenizer."""
    if what == "NaN":
        (weights,) = path.glob("*.safetensors")
        tensors = load_file(weights)
        name = next(name for name in tensors if name.endswith("layers.1.mlp.up_proj.weight_scale"))
        tensors[name][3] = float("nan")
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        one, other = list(vocabulary)[300:302]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize("receipt", [True, False], ids=["ours", "anybody's"])
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("NaN", "layers.1.mlp.up_proj.weight_scale"),
        ("tokenizer", "tokenizer.json"),
    ],
)
def test_nan_or_another_tokenizer_is_a_row_that_failed(
    nano_path, text, tmp_path, what, says, receipt
):
    """The others are measured, and table, page, CSV and JSON are made."""
    api.convert(nano_path, tmp_path / "right", "int4", NO_PROOF)
    shutil.copytree(tmp_path / "right", tmp_path / "wrong")
    broken(tmp_path / "wrong", what)
    if not receipt:
        (tmp_path / "wrong" / "qwen35-receipt.json").unlink()
    names = [tmp_path / "wrong", tmp_path / "right"]
    files = ["--html", tmp_path / "page.html", "--csv", tmp_path / "table.csv"]
    words = ["compare", *names, "--against", nano_path, "--text", text, *files, "--json", "-q"]
    done = called(*words)
    assert done.returncode == 1, done.stderr
    rows = {one["name"]: one for one in json.loads(done.stdout)["artifacts"]}
    assert rows["right"]["passed"]
    assert rows["right"]["frontier"]
    assert not rows["wrong"]["passed"]
    assert not rows["wrong"]["frontier"]
    assert any(says in failure["tensor"] for failure in rows["wrong"]["failures"])
    assert (rows["wrong"]["kl_mean"] is None) == (what == "NaN")
    page = (tmp_path / "page.html").read_text()
    assert "Not verified" in page
    assert says in page
    with (tmp_path / "table.csv").open() as file:
        assert {row["name"]: row["passed"] for row in csv.DictReader(file)} == {
            "right": "True",
            "wrong": "False",
        }


def test_an_artifact_that_read_the_text_before_is_named(nano_path, text, tmp_path):
    changes = [f"quantize.calibrate={{text: {text}, tokens: 512}}"]
    api.convert(nano_path, tmp_path / "int4", "int4-gptq", NO_PROOF, overrides=changes)
    found = measuring.compare(
        nano_path,
        [],
        [tmp_path / "int4"],
        text=text,
        folders=measuring.Folders(tmp_path),
        options=QUIET,
    )
    assert [one.calibrated for one in found.entries] == [True]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "has neither --recipe nor --against"),
        (["SOURCE"], "has neither --recipe nor --against"),
        (["SOURCE", "SOURCE", "--recipe", "int4"], "has 2 sources, expected one"),
        (["--against", "SOURCE"], "ARTIFACT is missing"),
        (["SOURCE", "--recipe", "int4", "--recipe", "int4"], "int4 is given twice"),
        (["SOURCE", "--recipe", "int5"], "recipe 'int5' is neither bundled nor a file"),
        (["SOURCE", "--against", "SOURCE"], "is the source itself"),
        (["SOURCE", "--recipe", "int4", "--text", "nowhere"], "nowhere cannot be read"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_any_work(
    nano_path, tmp_path, monkeypatch, words, says
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure.Measuring, "entries", None)
    done = called("compare", *[str(nano_path) if word == "SOURCE" else word for word in words])
    assert done.returncode == 2
    assert says in done.stderr.replace("\n  expected", ", expected").replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_an_artifact_of_another_model_is_refused(nano_path, text, tmp_path):
    other = dense(tmp_path / "other")
    with pytest.raises(FormatError, match="belongs to another model"):
        measuring.compare(nano_path, [], [other], text=text, folders=measuring.Folders(tmp_path))


def test_an_artifact_with_a_rope_that_is_not_computed_is_refused(nano_path, text, tmp_path):
    """Before any work, as the source would be: not after hours, with the others."""
    api.convert(nano_path, tmp_path / "right", "bf16-split", NO_PROOF)
    config = json.loads((tmp_path / "right" / "config.json").read_text())
    config["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}
    (tmp_path / "right" / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=r"right: config.json: rope_type 'dynamic' is not"):
        measuring.compare(
            nano_path,
            [],
            [tmp_path / "right"],
            text=text,
            folders=measuring.Folders(tmp_path / "work"),
        )
    assert list((tmp_path / "work").iterdir()) == []


def test_two_artifacts_of_one_name_are_told_apart_by_their_paths(nano_path, tmp_path):
    from qwen35_convert.comparison.candidates import named_candidates

    paths = [tmp_path / "a" / "model", tmp_path / "b" / "model"]
    assert [one.name for one in named_candidates([], paths, tmp_path)] == [*map(str, paths)]
    with pytest.raises(RecipeError, match="is given twice"):
        named_candidates([], [paths[0], paths[0]], tmp_path)


@pytest.mark.parametrize("option", ["--html", "--csv"])
def test_a_file_that_cannot_be_written_is_refused_before_any_work(nano_path, tmp_path, option):
    done = called("compare", nano_path, "--recipe", "int4", option, tmp_path)
    assert done.returncode == 4
    assert "is a folder" in done.stderr


def test_verify_writes_the_same_page(nano_path, text, tmp_path):
    api.convert(nano_path, tmp_path / "fp8", "fp8-block", NO_PROOF)
    page = tmp_path / "pages" / "page.html"
    words = ["verify", tmp_path / "fp8", "--html", page, "-q"]
    refused = called(*words)
    assert refused.returncode == 2
    assert "--against" in refused.stderr
    assert called(*words, "--against", nano_path).returncode == 0
    assert "Predictions were not measured" in page.read_text()
    done = called(*words, "--against", nano_path, "--level", "logits", "--text", text)
    assert done.returncode == 0
    assert "Where the error enters" in page.read_text()
