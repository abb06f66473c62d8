"""Words that would mean something else are refused: empty ones, and a file named as a folder."""

from __future__ import annotations

import pytest

from qwen35_convert.errors import RecipeError
from qwen35_convert.odd_words import check_words
from tests.qwen35_convert.command import called

EMPTY = (
    (["verify", "a", "--against", ""], "--against is empty"),
    (["verify", "a", "--against="], "--against is empty"),
    (["convert", "", "-o", "b"], "an argument is empty"),
    (["convert", "a", "-o", ""], "-o is empty"),
    (["convert", "a", "-o", "b", "--recipe", ""], "--recipe is empty"),
)
FULL = (
    ["run", "a", "--prompt", ""],
    ["run", "a", "--prompt", "--seed="],
    ["run", "a", "--prompt="],
    ["convert", "a", "-o", "b", "--set", "only="],
    ["convert", "a.gguf/", "-o", "b/"],
    ["convert", "a", "-o", "b.gguf"],
    ["run", "a", "--prompt", "-ob.gguf/"],
    [],
)


@pytest.mark.parametrize(("words", "message"), EMPTY)
def test_an_empty_word_is_refused(words, message):
    with pytest.raises(RecipeError, match=f"^{message}") as refusal:
        check_words(words)
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize("words", FULL)
def test_other_words_may_be_anything(words):
    check_words(words)


def test_the_command_exits_with_2(nano):
    done = called("verify", nano, "--against", "")
    assert done.returncode == 2
    assert "--against is empty" in done.stderr


@pytest.mark.parametrize(
    "words", [["-o", "b.gguf/"], ["--out", "b.gguf//"], ["--out=b.gguf/"], ["-ob.gguf/"]]
)
def test_a_gguf_file_is_not_named_as_a_folder(words):
    with pytest.raises(RecipeError, match=r"^-o is a folder, .*b\.gguf/") as refusal:
        check_words(["convert", "a", *words])
    assert refusal.value.exit_code == 2
