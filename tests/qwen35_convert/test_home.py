"""`~` where a shell does not replace it."""

from __future__ import annotations

import sys

import pytest

from qwen35_convert import cli
from qwen35_convert.home import at_home


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("~", "/home/ada"),
        ("~/model", "/home/ada/model"),
        ("--out=~/model", "/home/ada/model"),
        ("-o~/model", "/home/ada/model"),
        ("quantize.imatrix=~/im.gguf", "/home/ada/im.gguf"),
    ],
)
def test_the_home_folder_is_put_in(monkeypatch, word, read):
    monkeypatch.setenv("HOME", "/home/ada")
    assert at_home(["convert", word]) == ["convert", word.partition("~")[0] + read]


@pytest.mark.parametrize("word", ["./~/model", "~model", "a~/b", "owner/name~", "model", "-o", ""])
def test_other_words_stay(word):
    assert at_home(["convert", word]) == ["convert", word]


def test_a_prompt_stays():
    assert at_home(["--prompt", "~/x", "--prompt=~/x"]) == ["--prompt", "~/x", "--prompt=~/x"]


def test_out_in_the_home_folder_is_written_there(nano, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    words = ["qwen35", "convert", str(nano), "--out=~/out", "--no-verify", "-q"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as done:
        cli.main()
    assert done.value.code == 0
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]
