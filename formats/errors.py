"""The errors that a user can cause: one base class, which knows its exit code and its parts.

    qwen35: SUBJECT GOT, expected EXPECTED
      from  WHERE
      fix   FIX
      left  LEFT

Raising one imports nothing. A kind is a class: each floor of the house defines its own, beside what
raises it. Anything else that reaches the command line is a bug, and keeps its traceback.
"""

from __future__ import annotations

from typing import ClassVar

FELL_SHORT, MISUSED, INPUT, OUTPUT, LACKING, INTERRUPTED = 1, 2, 3, 4, 5, 130
NOTHING = "nothing was written"


class Qwen35Error(ValueError):
    """What is wrong, in parts; `str` joins all but `left`, which the command line adds.

    subject   what is concerned, or the whole message
    got       what there is
    expected  what there should be
    where     what the expectation follows from
    fix       what to do
    left      what is on the disk now
    """

    exit_code: ClassVar[int] = INPUT

    def __init__(
        self,
        subject: str,
        got: str = "",
        expected: str = "",
        fix: str = "",
        *,
        where: str = "",
        left: str = NOTHING,
    ) -> None:
        self.subject, self.got, self.expected = subject, got, expected
        self.where, self.fix, self.left = where, fix, left
        super().__init__(subject)

    def __str__(self) -> str:
        return self.without_fix() + (f"\n  fix   {self.fix}" if self.fix else "")

    def without_fix(self) -> str:
        """Return what is wrong."""
        text = f"{self.subject} {self.got}" if self.got else self.subject
        text += f", expected {self.expected}" if self.expected else ""
        return text + (f"\n  from  {self.where}" if self.where else "")


class FormatError(Qwen35Error):
    """The input's bytes, names or sizes are not what they must be."""
