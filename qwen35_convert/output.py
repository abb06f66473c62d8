"""In which form a command tells its results and its errors: text, JSON or GitHub's annotations.

Results go to stdout. An error is a block of text on stderr in every form; JSON and annotations of
it go to stdout besides. `--junit FILE` writes either as test cases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.errors import INPUT, INTERRUPTED, LACKING, MISUSED, OUTPUT, Qwen35Error
from qwen35_convert import github
from qwen35_convert.errors import Mistake, OutputError, RecipeError

if TYPE_CHECKING:
    from qwen35_convert.artifact import Conversion
    from qwen35_convert.publish import Uploaded
    from qwen35_convert.verification.verify import Report

TEXT, JSON, GITHUB = FORMS = ("text", "json", "github")
MAX_MESSAGE = 4000
KINDS = {
    MISUSED: "misused",
    INPUT: "input",
    OUTPUT: "output",
    LACKING: "machine",
    INTERRUPTED: "interrupted",
}


@dataclass(frozen=True, slots=True)
class Output:
    """What was asked for: the form, the file of test cases, the command that they are named by."""

    form: str = TEXT
    junit: Path | None = None
    command: str = ""

    @classmethod
    def of(cls, command: str, form: str | None, junit: Path | None, *, json: bool) -> Output:
        """Return what options ask for; `json` is short for that form. RecipeError."""
        from qwen35_convert.options import check_choice

        if form is not None:
            check_choice("--output-format", form, FORMS)
        if json and form not in (None, JSON):
            raise RecipeError("--json", f"excludes --output-format {form}", "one of them")
        if junit is not None:
            _check_junit(junit)
        return cls(JSON if json else form or TEXT, junit, command)

    @classmethod
    def of_words(cls, words: Sequence[str]) -> Output:
        """Return what a command line asks for that may itself be wrong."""
        form = _value(words, "--output-format")
        junit = _value(words, "--junit")
        form = JSON if "--json" in words else form if form in FORMS else TEXT
        command = next((word for word in words if not word.startswith("-")), "")
        return cls(form, Path(junit) if junit else None, command)

    def conversion(self, done: Conversion) -> None:
        """Tell where an artifact is, and what its verification found."""
        from qwen35_convert import report

        if self.form == JSON:
            report.print_json(done.as_dict())
        elif self.form == GITHUB:
            notes = [("qwen35", note, github.NOWHERE) for note in done.plan.notes]
            _print_lines(github.several("notice", notes))
            self._fenced(lambda: report.print_conversion(done))
            self._annotate(done.report, str(done.out))
        else:
            report.print_conversion(done)
        self._cases(done.report, str(done.out))

    def verification(self, result: Report, artifact: str) -> None:
        """Tell what verification found."""
        from qwen35_convert import report

        if self.form == JSON:
            report.print_json(result.as_dict())
        elif self.form == GITHUB:
            self._fenced(lambda: report.print_report(result))
            self._annotate(result, artifact)
        else:
            report.print_report(result)
        self._cases(result, artifact)

    def upload(self, uploaded: Uploaded) -> None:
        """Tell what is, or would be, on the hub."""
        from qwen35_convert import report

        if self.form == JSON:
            report.print_json(uploaded.as_dict())
        elif self.form == GITHUB:
            self._fenced(lambda: report.print_upload(uploaded))
        else:
            report.print_upload(uploaded)

    def mistakes(self, recipe: str, mistakes: Sequence[Mistake]) -> None:
        """Tell what is wrong with a recipe, a line each."""
        from qwen35_convert import report

        if self.form == JSON:
            report.print_json({"recipe": recipe, "mistakes": [one.as_dict() for one in mistakes]})
        elif self.form == GITHUB and mistakes:
            _print_lines(github.of_mistakes(mistakes))
        else:
            _print_lines([str(one) for one in mistakes] or [f"{recipe}: no mistakes"])
        if self.junit:
            from qwen35_convert.junit import Case, Results

            case = Case("recipe", recipe, [str(one) for one in mistakes])
            Results(self.command, recipe, [case]).write(self.junit)

    def error(self, error: Qwen35Error) -> int:
        """Tell an error; return its exit code."""
        message = str(error)
        message = message if len(message) <= MAX_MESSAGE else f"{message[:MAX_MESSAGE]} ..."
        sys.stderr.write(f"qwen35: {message}\n  left  {error.left}\n")
        self._retell(error, error.exit_code)
        return error.exit_code

    def misuse(self, message: str, code: int) -> int:
        """Tell besides that the command line is wrong, which stderr says already."""
        self._retell(RecipeError(message), code)
        return code

    def _retell(self, error: Qwen35Error, code: int) -> None:
        """Tell an error in the forms for machines."""
        if self.form == JSON:
            from qwen35_convert import report

            report.print_json({"error": error_as_dict(error, code)})
        elif self.form == GITHUB:
            mistakes = error.mistakes if isinstance(error, RecipeError) else ()
            alone = [github.annotation("error", f"qwen35 {self.command}", str(error)[:MAX_MESSAGE])]
            _print_lines(github.of_mistakes(mistakes) if mistakes else alone)
        if self.junit:
            from qwen35_convert.junit import of_error

            try:
                of_error(self.command, error).write(self.junit)
            except OutputError as second:
                if str(second) != str(error):
                    sys.stderr.write(f"qwen35: {second}\n")

    def _annotate(self, result: Report | None, artifact: str) -> None:
        failures = result.failures if result else []
        entries = [(f"{artifact}: {one.tensor}", one.problem, github.NOWHERE) for one in failures]
        _print_lines(github.several("error", entries))

    def _fenced(self, tell: Callable[[], None]) -> None:
        """Print text in which nothing is a command to GitHub."""
        before, after = github.fence()
        _print_lines([before])
        try:
            tell()
        finally:
            _print_lines([after])

    def _cases(self, result: Report | None, artifact: str) -> None:
        if self.junit is None:
            return
        from qwen35_convert.junit import Case, Results, of_report

        cases = of_report(result) if result else []
        done = [Case(self.command, self.command)] if self.command != "verify" else []
        Results(self.command, artifact, [*done, *cases]).write(self.junit)


def error_as_dict(error: Qwen35Error, code: int) -> dict[str, Any]:
    """Return an error as JSON prints it: its kind, the whole message, and its parts."""
    mistakes = error.mistakes if isinstance(error, RecipeError) else ()
    return {
        "kind": KINDS.get(code, "failed"),
        "exit_code": code,
        "message": str(error),
        "subject": error.subject,
        "got": error.got,
        "expected": error.expected,
        "where": error.where,
        "fix": error.fix,
        "left": error.left,
        "mistakes": [one.as_dict() for one in mistakes],
    }


def _check_junit(path: Path) -> None:
    """Refuse test cases that could not be written at the end; a pipe and /dev/stdout can."""
    from qwen35_convert.durable import check_place
    from qwen35_convert.errors import OutputError
    from qwen35_convert.heads import TEST_CASES

    if path.is_dir():
        raise OutputError(f"--junit {path}", "cannot be written: Is a directory")
    if path.is_file() or not path.exists():
        check_place(path, TEST_CASES.encode())


def _value(words: Sequence[str], option: str) -> str | None:
    """Return the value of an option as it is written, if it is."""
    for word, following in pairwise([*words, ""]):
        if word == option:
            return following
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
    return None


def _print_lines(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
