"""Mistakes on a command line: each is answered with what was probably meant, and writes nothing."""

from __future__ import annotations

import re

import pytest

from tests.qwen35_convert.command import called

CALIBRATE = "quantize.calibrate.text"


@pytest.mark.parametrize(
    ("arguments", "guess"),
    [
        (["recipe"], "Did you mean 'recipes'?"),
        (["downlaod", "x"], "Did you mean 'download'?"),
        (["bunch"], "Did you mean 'bench'?"),
        (["convert", "x", "--recip", "x"], "Did you mean '--recipe'?"),
        (["convert", "x", "--over"], "Did you mean '--overwrite'?"),
        (["verify", "x", "--max"], "Did you mean '--max-kl'?"),
        (["verify", "x", "--level", "logit"], "did you mean 'logits'?"),
        (["convert", "x", "-o", "y", "--recipe", "fp8"], "did you mean 'fp8-block'?"),
        (["convert", "x", "-o", "y", "--device", "cuda0"], "did you mean 'cuda'?"),
        (
            ["convert", "x", "-o", "y", "--recipe", "int4", "--set", "quantize.schem=keep"],
            "did you mean 'scheme'?",
        ),
    ],
)
def test_a_mistake_gets_one_guess(arguments, guess):
    done = called(*arguments)
    assert done.returncode == 2
    assert guess in done.stderr
    assert done.stderr.lower().count("did you mean") <= 1
    assert not re.search(r"id you mean '[^']*',|Possible options", done.stderr)


@pytest.mark.parametrize(
    ("arguments", "example"),
    [
        (["convert", "x"], "convert Qwen/Qwen3.5-27B -o"),
        (["convert", "x", "out"], "convert Qwen/Qwen3.5-27B -o"),
        (["convert", "-o", "out"], "convert Qwen/Qwen3.5-27B -o"),
        (["verify", "x", "source"], "--against"),
        (["verify", "x", "--source", "y"], "--against"),
        (["run", "x", "Hello"], "--prompt"),
    ],
)
def test_words_in_the_wrong_place_get_an_example(arguments, example):
    done = called(*arguments)
    assert done.returncode == 2
    said, shown = done.stderr.splitlines()[-2:]
    assert said.startswith("Error: ")
    assert shown.startswith("Example: qwen35 ")
    assert example in shown


def test_a_wrong_value_gets_no_example():
    assert "Example" not in called("convert", "x", "-o", "y", "--workers", "0").stderr


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["--recipe", "fp8-block", "-o", "x.gguf"], "a recipe that writes gguf, such as gguf-q8_0"),
        (
            ["--recipe", "gguf-q8_0", "-o", "x"],
            "expected a name that ends in .gguf and is not a folder",
        ),
    ],
)
def test_an_out_of_another_format_is_refused_with_the_recipe_it_needs(
    tmp_path, monkeypatch, nano, arguments, fix
):
    monkeypatch.chdir(tmp_path)
    done = called("convert", nano, *arguments)
    assert done.returncode == 2
    assert fix in done.stderr


@pytest.mark.parametrize("scheme", ["q4_k_m", "Q4_K_M", "iq4-xs"])
def test_a_type_of_gguf_is_no_scheme_but_has_a_recipe(scheme):
    done = called("quantize", "x", "-o", "y", "--scheme", scheme)
    assert done.returncode == 2
    recipe = f"gguf-{scheme.lower().replace('-', '_')}"
    assert f"qwen35 convert SOURCE -o NAME.gguf --recipe {recipe}" in done.stderr


def test_a_source_that_is_misspelt_is_answered_with_the_nearest(tmp_path, monkeypatch, nano):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "nano-dense").symlink_to(nano)
    for word in ("./modles/nano-dense", "models/nano-dence/", "./models/nano"):
        done = called("inspect", word)
        assert done.returncode == 3
        assert "give a path that exists, such as models/nano-dense, or " in done.stderr


def test_a_name_on_the_hub_that_ends_in_a_slash_is_told_apart_from_a_folder():
    done = called("inspect", "acme/Borealis-4B/")
    assert done.returncode == 3
    assert "or acme/Borealis-4B without the slash at its end" in done.stderr


def test_an_artifact_and_its_source_in_the_wrong_order_are_asked_about(tmp_path, nano):
    out = tmp_path / "out"
    assert called("convert", nano, "-o", out, "--no-verify").returncode == 0
    done = called("verify", nano, "--against", out)
    assert done.returncode == 1
    assert f"qwen35 verify {out} --against {nano}" in done.stderr
    assert "if" not in called("verify", nano, "--against", out, "--quiet").stderr


def test_an_imatrix_that_is_not_there_is_named_once(tmp_path, nano):
    words = ["convert", nano, "-o", tmp_path / "x.gguf", "--set", "quantize.imatrix=im.gguf"]
    done = called(*words)
    assert done.returncode == 3
    assert "quantize.imatrix: im.gguf cannot be read: No such file" in done.stderr


def test_a_vision_file_given_for_the_model_is_told_from_it(tmp_path, nano):
    words = ["--recipe", "gguf-bf16", "--set", "vision=keep", "--no-verify", "-q"]
    assert called("convert", nano, "-o", tmp_path / "m.gguf", *words).returncode == 0
    done = called("inspect", tmp_path / "mmproj-m.gguf")
    assert done.returncode == 3
    assert "'clip': a vision tower, expected a language model" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["imatrix", "NANO", "-o", "im.gguf", "--text", "nope.txt"],
        ["verify", "NANO", "--against", "NANO", "--level", "logits", "--text", "nope.txt"],
        [
            "convert",
            "NANO",
            "-o",
            "x",
            "--recipe",
            "int4-gptq",
            "--set",
            "quantize.calibrate.text=nope.txt",
        ],
    ],
    ids=lambda words: words[0],
)
def test_a_text_that_is_not_there_is_named_in_plain_words(tmp_path, monkeypatch, nano, arguments):
    monkeypatch.chdir(tmp_path)
    done = called(*[nano if word == "NANO" else word for word in arguments])
    assert done.returncode == 2
    assert "text nope.txt cannot be read: No such file or directory\n" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [["verify"], ["upload", "--dry-run"]])
def test_an_artifact_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    done = called(*command, "models/mien", *(["me/x"] if "upload" in command else []))
    assert done.returncode == 3
    assert "models/mien does not exist, expected a folder or a file here" in done.stderr
    assert "such as models/mine; if it is on the hub: qwen35 download models/mien" in done.stderr


def test_a_recipe_s_file_that_is_misspelt_is_answered_with_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "ours.yaml").write_text("extends: fp8-block\n")
    for words in (["convert", "x", "-o", "y", "--recipe"], ["recipes", "--check"]):
        done = called(*words, "recipes/our.yaml")
        told = done.stdout + done.stderr
        assert done.returncode == 2
        assert "did you mean 'recipes/ours.yaml'?" in told
        assert "known" not in told
    assert told.startswith("--check: recipe 'recipes/our.yaml' is neither bundled nor a file")
