"""Which level is verified: the one asked for, or logits if a threshold is stated.

A stated threshold is always measured: at a lower level it would be a gate that stands open.
"""

from __future__ import annotations

from dataclasses import dataclass

from formats.checkpoint import Checkpoint
from qwen35_convert.errors import RecipeError
from qwen35_convert.levels import LEVELS, LOGITS
from qwen35_convert.options import check_choice
from qwen35_convert.text.generation import check_head
from qwen35_convert.text.tokens import DEFAULT
from qwen35_convert.verification.logits import LogitsCheck, token_rows


@dataclass(frozen=True, slots=True)
class Level:
    """The level that is verified; `raised` says why it is not the one asked for."""

    name: str
    raised: str | None = None

    def __str__(self) -> str:
        return f"level {self.name} ({self.raised})" if self.raised else f"level {self.name}"


def effective_level(level: str, check: LogitsCheck) -> Level:
    """Return the level to verify. RecipeError for one that does not exist."""
    check_choice("level", level, LEVELS)
    if level == LOGITS or not check.stated:
        return Level(level)
    verb = "is" if len(check.stated) == 1 else "are"
    return Level(LOGITS, f"raised from {level}: {' and '.join(check.stated)} {verb} stated")


def check_measurable(
    level: Level, check: LogitsCheck, source: Checkpoint, *, only: str | None = None
) -> None:
    """Refuse, before any work, logits that could not be measured.

    RecipeError for a slice (`only`), and for a text that cannot be read or is too short;
    FormatError for a model without a head, or with a rope that is not computed.
    """
    if level.name != LOGITS:
        return
    if only is not None:
        raise RecipeError(
            f"only is {only!r}: a slice of a model has no logits, and this is {level}",
            fix="leave out verify.max_kl and verify.min_top1 and use level tensors, "
            "or add --no-verify",
        )
    from runtime.kernels.attention.frequencies import check_rope

    check_head(source)
    check_rope(source.config.rope)
    token_rows(source, check.text)


def need_logits(level: Level, check: LogitsCheck) -> None:
    """Refuse what only level logits reads, at a level that would leave it unread. RecipeError."""
    for option, stated in (("--text", check.text != DEFAULT), ("--logits-cache", check.cache)):
        if stated and level.name != LOGITS:
            got = f"is for level {LOGITS}, and this is {level}: it would not be read"
            raise RecipeError(option, got, fix=f"add --level {LOGITS}, or leave out {option}")


def need_source(level: Level, *, given: bool) -> None:
    """Refuse to compare logits with nothing. RecipeError."""
    if level.name == LOGITS and not given:
        raise RecipeError(f"{level} compares with a source, but none is named (--against)")
