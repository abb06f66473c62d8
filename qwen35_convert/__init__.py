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
file, or a `Recipe`. Errors that a caller can cause are subclasses of `Qwen35Error`.

Importing this imports no torch: a function is loaded when it is first used. The four packages have
plain names: if another project's `formats`, `quant` or `runtime` would be imported instead, the
import is refused.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from formats.errors import FormatError, Qwen35Error
    from quant.errors import QuantError
    from qwen35_convert.api import convert, download, plan, quantize, run_text, upload, verify
    from qwen35_convert.artifact import Conversion
    from qwen35_convert.benchmarking.bench import Bench
    from qwen35_convert.benchmarking.sweep import Sweep
    from qwen35_convert.comparison.folders import Folders
    from qwen35_convert.comparison.result import Comparison
    from qwen35_convert.containers.gguf.imatrix_file import ImatrixReport
    from qwen35_convert.errors import FetchError, MissingError, OutputError, RecipeError
    from qwen35_convert.failure import Failure
    from qwen35_convert.fit.goal import Fitted, Goal
    from qwen35_convert.fit.question import Question
    from qwen35_convert.fit.sensitivity import Sensitivity
    from qwen35_convert.hub.fetch import Fetched
    from qwen35_convert.inspection.inspect import Inspection
    from qwen35_convert.inspection.source import inspect
    from qwen35_convert.measuring import bench, compare, fit_recipe, imatrix, sensitivity
    from qwen35_convert.options import Limit, RunOptions
    from qwen35_convert.planning.plan import Plan
    from qwen35_convert.publish import Uploaded
    from qwen35_convert.recipe.recipe import Recipe, read_recipe
    from qwen35_convert.source import Merge
    from qwen35_convert.text.generation import Prompt
    from qwen35_convert.verification.logits import LogitsCheck
    from qwen35_convert.verification.verify import Report

API = "qwen35_convert.api"
HOMES = {  # of what is not in API
    "Bench": "qwen35_convert.benchmarking.bench",
    "Comparison": "qwen35_convert.comparison.result",
    "Conversion": "qwen35_convert.artifact",
    "Failure": "qwen35_convert.failure",
    "FetchError": "qwen35_convert.errors",
    "Fetched": "qwen35_convert.hub.fetch",
    "Fitted": "qwen35_convert.fit.goal",
    "Folders": "qwen35_convert.comparison.folders",
    "FormatError": "formats.errors",
    "Goal": "qwen35_convert.fit.goal",
    "ImatrixReport": "qwen35_convert.containers.gguf.imatrix_file",
    "Inspection": "qwen35_convert.inspection.inspect",
    "Limit": "qwen35_convert.options",
    "LogitsCheck": "qwen35_convert.verification.logits",
    "Merge": "qwen35_convert.source",
    "MissingError": "qwen35_convert.errors",
    "OutputError": "qwen35_convert.errors",
    "Plan": "qwen35_convert.planning.plan",
    "Prompt": "qwen35_convert.text.generation",
    "QuantError": "quant.errors",
    "Question": "qwen35_convert.fit.question",
    "Qwen35Error": "formats.errors",
    "Recipe": "qwen35_convert.recipe.recipe",
    "RecipeError": "qwen35_convert.errors",
    "Report": "qwen35_convert.verification.verify",
    "RunOptions": "qwen35_convert.options",
    "Sensitivity": "qwen35_convert.fit.sensitivity",
    "Sweep": "qwen35_convert.benchmarking.sweep",
    "Uploaded": "qwen35_convert.publish",
    "bench": "qwen35_convert.measuring",
    "compare": "qwen35_convert.measuring",
    "fit_recipe": "qwen35_convert.measuring",
    "imatrix": "qwen35_convert.measuring",
    "inspect": "qwen35_convert.inspection.source",
    "read_recipe": "qwen35_convert.recipe.recipe",
    "sensitivity": "qwen35_convert.measuring",
}

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
    return getattr(import_module(HOMES.get(name, API)), name)


def __dir__() -> list[str]:
    return sorted(__all__)
