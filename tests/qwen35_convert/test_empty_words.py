"""An empty word is a variable that is not set: refused, it never means the current folder."""

from __future__ import annotations

import pytest

from qwen35_convert.empty_words import check_words
from qwen35_convert.errors import RecipeError
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
    [],
)


@pytest.mark.parametrize(("words", "message"), EMPTY)
def test_an_empty_word_is_refused(words, message):
    with pytest.raises(RecipeError, match=f"^{message}") as refusal:
        check_words(words)
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize("words", FULL)
def test_a_prompt_may_be_empty(words):
    check_words(words)


def test_the_command_exits_with_2(nano):
    done = called("verify", nano, "--against", "")
    assert done.returncode == 2
    assert "--against is empty" in done.stderr
