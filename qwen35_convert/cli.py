"""The `qwen35` command. A command parses, makes one call of `qwen35_convert.api`, prints.

Results go to stdout, progress and warnings to stderr. Exit codes: 0 done, 1 verification fell
short, 2 misused, 3 input refused, 4 output refused, 5 this machine lacks something, 130
interrupted. Nothing heavy is imported before a command needs it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Annotated, Any

import typer

from formats.errors import INPUT, INTERRUPTED, LACKING, Qwen35Error
from qwen35_convert.commands import (
    comparing,
    converting,
    fitting,
    hub,
    looking,
    proving,
    recipes,
    using,
)
from qwen35_convert.errors import Interrupted, OutputError
from qwen35_convert.home import at_home
from qwen35_convert.misuse import show_misuse
from qwen35_convert.odd_words import check_words
from qwen35_convert.output import Output
from qwen35_convert.streams import lost, outlive_readers

COMMANDS = (
    looking.inspect,
    hub.download,
    converting.convert,
    converting.quantize,
    proving.verify,
    comparing.compare,
    using.imatrix,
    fitting.sensitivity,
    using.bench,
    using.run,
    hub.upload,
    recipes.recipes,
)
DONE = "what the command writes is there; only what it prints is lost"
COLLECTED_FROM = 200_000  # new objects; at Python's 700, collections are a tenth of `import torch`


def _print_version(wanted: bool) -> None:
    if wanted:
        from qwen35_convert.versions import version_line

        print(version_line())
        raise typer.Exit


def qwen35(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, and those of torch, triton and numba.",
        ),
    ] = False,
) -> None:
    """Convert, quantise and verify Qwen3.5-family checkpoints."""


def _app_of(commands: Iterable[Callable[..., Any]]) -> typer.Typer:
    """Return the command line of these commands."""
    made = typer.Typer(
        name="qwen35",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=True,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(qwen35)
    for command in commands:
        made.command()(command)
    return made


app = _app_of(COMMANDS)


@cache
def _parser_of(word: str) -> Callable[..., Any]:
    """Return what parses a command line that begins with a word; to parse all takes 30 ms more."""
    named = [command for command in COMMANDS if command.__name__ == word]
    return typer.main.get_command(_app_of(named or COMMANDS))


def main() -> None:
    """Run the command line; errors are one block on stderr, a traceback is a bug."""
    if sys.platform == "win32":
        print("qwen35: Windows is not supported; use WSL, which is Linux", file=sys.stderr)
        sys.exit(LACKING)
    gc.set_threshold(COLLECTED_FROM)
    outlive_readers()
    words = at_home(sys.argv[1:])
    try:
        from qwen35_convert.run.bus_error import exit_on_bus_error

        exit_on_bus_error(INPUT)
        code = run_words(words)
    except KeyboardInterrupt:  # before or after the command itself
        code = Output.of_words(words).error(Interrupted())
    sys.exit(_with_output(code))


def _with_output(code: int) -> int:
    """Return the exit code of a command, or that of output which could not be written."""
    error = lost()
    if error is None:
        return code
    told = OutputError("standard output", f"cannot be written: {error.strerror}", left=DONE)
    return code or Output().error(told)


def run_words(words: Sequence[str]) -> int:
    """Run a command line; return its exit code."""
    output = Output.of_words(words)
    try:
        check_words(words)
        parse = _parser_of(words[0] if words else "")
        code = parse(list(words), prog_name="qwen35", standalone_mode=False) or 0
    except typer.TyperException as error:
        return output.misuse(show_misuse(error), error.exit_code)
    except Qwen35Error as error:
        return output.error(error)
    if code == INTERRUPTED:
        return output.error(Interrupted())
    return int(code)


if __name__ == "__main__":
    main()
