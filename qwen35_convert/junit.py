"""Results as JUnit's XML, which every CI server draws: a suite a level, a test case a check.

Source: the schema of Jenkins' xUnit plugin, which GitLab, GitHub's test reporters and Azure read.
It holds no times, so equal results are equal files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as Xml

from formats.errors import Qwen35Error
from qwen35_convert.durable import check_replaced, save_file
from qwen35_convert.errors import OutputError
from qwen35_convert.heads import TEST_CASES
from qwen35_convert.levels import LEVELS

if TYPE_CHECKING:
    from qwen35_convert.failure import Failure
    from qwen35_convert.verification.verify import Report

NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
MAX_LISTED = 200


@dataclass(frozen=True, slots=True)
class Case:
    """One test case: passed if there is neither a failure, an error nor a reason to skip it."""

    suite: str
    name: str
    failures: Sequence[str] = ()
    error: str = ""
    skipped: str = ""


@dataclass(frozen=True, slots=True)
class Results:
    """What a command found, by test cases; `subject` is the artifact."""

    command: str
    subject: str
    cases: list[Case] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write the file, and the folders it goes into. OutputError if that fails."""
        check_replaced(path, TEST_CASES.encode())
        if path.is_file() or not path.exists():
            save_file(path, self.xml())
            return
        try:
            path.write_bytes(self.xml())  # a pipe, or /dev/stdout
        except OSError as error:
            raise OutputError(f"--junit {path}", f"cannot be written: {error.strerror}") from None

    def xml(self) -> bytes:
        """Return the document."""
        root = Xml.Element("testsuites", {"name": f"qwen35 {self.command}", **_counts(self.cases)})
        for suite in dict.fromkeys(case.suite for case in self.cases):
            cases = [case for case in self.cases if case.suite == suite]
            parent = Xml.SubElement(root, "testsuite", {"name": suite, **_counts(cases)})
            for case in cases:
                self._add(parent, case)
        Xml.indent(root)
        body: bytes = Xml.tostring(root, "utf-8", xml_declaration=True)
        return body + b"\n"

    def _add(self, parent: Xml.Element, case: Case) -> None:
        names = {"classname": _text(f"{self.subject}.{case.suite}"), "name": _text(case.name)}
        node = Xml.SubElement(parent, "testcase", names)
        if case.failures:
            message = (
                case.failures[0] if len(case.failures) == 1 else f"{len(case.failures)} failures"
            )
            failure = Xml.SubElement(node, "failure", {"message": _text(message)})
            more = len(case.failures) - MAX_LISTED
            tail = [f"and {more} more"] if more > 0 else []
            failure.text = _text("\n".join([*case.failures[:MAX_LISTED], *tail]))
        if case.error:
            first = case.error.split("\n", 1)[0]
            Xml.SubElement(node, "error", {"message": _text(first)}).text = _text(case.error)
        if case.skipped:
            Xml.SubElement(node, "skipped", {"message": case.skipped})


def of_report(report: Report) -> list[Case]:
    """Return a case for every check of the levels that were verified."""
    from qwen35_convert.verification.table import CHECKS
    from qwen35_convert.verification.verify import OPENING

    reached = LEVELS[: LEVELS.index(report.level) + 1]
    opening = [_line(one) for one in report.checks[OPENING]]
    cases = [Case(reached[0], OPENING, opening)]
    for check in (check for check in CHECKS if check.level in reached):
        failures = report.checks.get(check.id)
        lines = [_line(one) for one in failures or ()]
        skipped = "" if failures is not None else "nothing to look at"
        cases.append(Case(check.level, check.id, lines, skipped=skipped))
    return cases


def _line(failure: Failure) -> str:
    return f"{failure.tensor}: {failure.problem}"


def of_error(command: str, error: Qwen35Error) -> Results:
    """Return the results of a command that was refused."""
    return Results(command, "qwen35", [Case(command, command, error=str(error))])


def _counts(cases: Sequence[Case]) -> dict[str, str]:
    return {
        "tests": str(len(cases)),
        "failures": str(sum(bool(case.failures) for case in cases)),
        "errors": str(sum(bool(case.error) for case in cases)),
        "skipped": str(sum(bool(case.skipped) for case in cases)),
    }


def _text(text: str) -> str:
    """Return text without the characters that XML cannot hold."""
    return NOT_XML.sub("\ufffd", text)
