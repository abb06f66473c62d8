"""Bars on stderr: bytes with a rate and an ETA, that end at 100 %, without colour."""

from __future__ import annotations

import re
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from qwen35_convert.cli import run_words
from qwen35_convert.progress import bytes_bar
from tests.checkpoints import moe

BAR = re.compile(r"(\w+): +(\d+)%\|.*?\| (\S+)/(\S+) \[\d+:\d+<(\d+:\d+|\?), +(\S+)B/s\]")


class Terminal(StringIO):
    """What tqdm takes for a terminal."""

    def isatty(self) -> bool:
        return True


def seen(*words: object) -> str:
    """Return what a command shows on a terminal; it must succeed."""
    with redirect_stderr(Terminal()) as screen, redirect_stdout(StringIO()):
        assert run_words([*map(str, words)]) == 0
    return screen.getvalue()


def last_of(screen: str) -> dict[str, re.Match[str]]:
    """Return the last state of every bar."""
    return {found[1]: found for found in BAR.finditer(screen)}


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    return moe(tmp_path_factory.mktemp("experts") / "in")


RECIPES = {
    "fp8-block": ("out", ()),
    "bf16-split": ("out", ("--set", "mtp=drop")),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_conversion_ends_at_100_percent_of_its_bytes(experts, tmp_path, recipe):
    name, more = RECIPES[recipe]
    bars = last_of(seen("convert", experts, "-o", tmp_path / name, "--recipe", recipe, *more))
    assert list(bars) == ["convert", "verify"]
    for bar in bars.values():
        assert bar[2] == "100"
        assert bar[3] == bar[4]
        assert re.fullmatch(r"[\d.]+[kM]", bar[4])


def test_a_vision_file_counts_too(nano, tmp_path):
    words = ["--recipe", "gguf-bf16", "--set", "vision=keep", "--no-verify"]
    bar = last_of(seen("convert", nano, "-o", tmp_path / "m.gguf", *words))["convert"]
    assert (bar[2], bar[3]) == ("100", bar[4])


def test_verification_counts_bytes_without_a_receipt_too(experts, tmp_path):
    out = tmp_path / "out"
    seen("convert", experts, "-o", out, "-q", "--no-verify")
    (out / "qwen35-receipt.json").unlink()
    bar = last_of(seen("verify", out, "--against", experts))["verify"]
    assert (bar[2], bar[3]) == ("100", bar[4])


def test_every_byte_is_counted_once(experts, tmp_path, monkeypatch):
    """100 % must come of the work, not of the end."""
    counted: dict[str, list[int]] = {}

    def bar(total, what, *, shown):
        assert shown
        counted[what] = [total, 0]

        class Bar:
            def __enter__(self):
                def add(nbytes: int) -> None:
                    counted[what][1] += nbytes

                return add

            def __exit__(self, *_):
                return None

        return Bar()

    monkeypatch.setattr("qwen35_convert.artifact.bytes_bar", bar)
    monkeypatch.setattr("qwen35_convert.verification.shown.bytes_bar", bar)
    seen("convert", experts, "-o", tmp_path / "out", "--recipe", "fp8-block-hub")
    assert counted["convert"][0] == counted["convert"][1] > 0
    assert counted["verify"][0] == counted["verify"][1] > 0


def test_what_fails_does_not_claim_to_be_whole():
    def fail() -> None:
        with bytes_bar(1000, "convert", shown=True) as advance:
            advance(300)
            raise RuntimeError

    with redirect_stderr(Terminal()) as screen, pytest.raises(RuntimeError):
        fail()
    assert last_of(screen.getvalue())["convert"][2] == "30"


def test_no_color_is_honoured_and_quiet_shows_no_bar(experts, tmp_path, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    screen = seen("convert", experts, "-o", tmp_path / "out")
    assert not re.search(r"\x1b\[[0-9;]*m", screen)
    assert seen("convert", experts, "-o", tmp_path / "more", "-q") == ""
