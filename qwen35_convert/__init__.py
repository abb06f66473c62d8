"""What shall be done: the `qwen35` command and its Python API.

    >>> import qwen35_convert as q
    >>> recipe = q.read_recipe("fp8-block", ["quantize.scale=float32"])
    >>> done = q.convert("nano-dense", "nano-fp8", recipe, q.RunOptions(workers=1))
    >>> done.report.passed
    True
    >>> report = q.verify("nano-fp8", against="nano-dense")
    >>> report.failures
    []
    >>> q.inspect("nano-fp8").quantization
    'fp8-block'

A source is a folder, a file, or "owner/name[@revision]" on the hub; a recipe is a bundled name, a
file, or a `Recipe`. What a caller can cause is raised as a kind of `Qwen35Error`.

Importing this imports no torch: a function is loaded when it is first used. The four packages have
plain names; the guard refuses to run with another project's `formats`, `quant` or `runtime` in
their place, which would load without an error.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen35_convert.api import *

__all__ = [
    "Bench",
    "Comparison",
    "Conversion",
    "Failure",
    "FetchError",
    "Fetched",
    "Fitted",
    "Folders",
    "FormatError",
    "Goal",
    "ImatrixReport",
    "Inspection",
    "Limit",
    "LogitsCheck",
    "Merge",
    "MissingError",
    "OutputError",
    "Plan",
    "Prompt",
    "QuantError",
    "Question",
    "Qwen35Error",
    "Recipe",
    "RecipeError",
    "Report",
    "RunOptions",
    "Sensitivity",
    "Sweep",
    "Uploaded",
    "bench",
    "compare",
    "convert",
    "download",
    "fit_recipe",
    "imatrix",
    "inspect",
    "plan",
    "quantize",
    "read_recipe",
    "run_text",
    "sensitivity",
    "upload",
    "verify",
]


def _guard() -> None:
    home = Path(__file__).resolve().parent.parent
    for name in ("formats", "quant", "runtime"):
        spec = find_spec(name)
        place = Path(spec.origin).resolve().parent.parent if spec and spec.origin else None
        if place != home:
            raise ImportError(
                f"qwen35 needs its own package {name!r} from {home}, but Python finds {place}; "
                "install qwen35 in an environment of its own"
            )


_guard()


def __getattr__(name: str) -> Any:
    """Return a name of the API, which is imported on first use."""
    if name not in __all__:
        raise AttributeError(f"module 'qwen35_convert' has no attribute {name!r}")
    from qwen35_convert import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted(__all__)
