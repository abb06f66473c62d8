"""What shall be done: the `qwen35` command and its Python API.

    from qwen35_convert import convert, inspect, quantize, read_recipe, verify

The four packages have plain names; the guard refuses to run with another project's `formats`,
`quant` or `runtime` in their place, which would load without a word.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen35_convert.api import convert, inspect, plan, quantize, verify
    from qwen35_convert.recipe import Recipe, read_recipe

__all__ = ["Recipe", "convert", "inspect", "plan", "quantize", "read_recipe", "verify"]


def _guard() -> None:
    home = Path(__file__).resolve().parent.parent
    for name in ("formats", "quant", "runtime"):
        spec = find_spec(name)
        found = Path(spec.origin).resolve().parent.parent if spec and spec.origin else None
        if found != home:
            raise ImportError(
                f"qwen35 needs its own package {name!r} from {home}, but Python finds {found}; "
                "install qwen35 in an environment of its own"
            )


_guard()


def __getattr__(name: str) -> Any:
    """Import the API on first use, so that the command line starts without torch."""
    if name not in __all__:
        raise AttributeError(f"module 'qwen35_convert' has no attribute {name!r}")
    from qwen35_convert import api, recipe

    return getattr(recipe if name in ("Recipe", "read_recipe") else api, name)
