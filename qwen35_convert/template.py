"""Chat templates compiled as engines compile them: sandboxed, with their tags, filters and globals.

Source: transformers 5.24, `_cached_compile_jinja_template`; vLLM and SGLang call it. Trap: Jinja's
own `tojson` escapes HTML, theirs does not.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from formats.errors import FormatError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.sandbox import ImmutableSandboxedEnvironment


def compile_template(text: str, where: str) -> Template:
    """Return a template ready to be rendered. FormatError says where it is no Jinja."""
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        return _compiled(text)
    except TemplateSyntaxError as error:
        reason = f"line {error.lineno}: {error.message}"
    except (TemplateError, RecursionError) as error:
        reason = str(error)
    raise FormatError(f"{where} is not a Jinja template: {reason}")


@lru_cache(maxsize=16)
def _compiled(text: str) -> Template:
    return _environment().from_string(text)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the assistant wrote; the text is what stands inside."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(value: Any, **how: Any) -> str:
    return json.dumps(value, **({"ensure_ascii": False} | how))


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _refuse(message: str) -> NoReturn:
    raise FormatError(f"the chat template refuses the prompt: {message}")
