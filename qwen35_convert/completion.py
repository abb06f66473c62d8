"""What a shell offers for the values of options, after `qwen35 --install-completion`.

A name that is no value is completed as a file by the shell itself.
"""

from __future__ import annotations

from qwen35_convert.levels import LEVELS
from qwen35_convert.options import DEVICES, EXECUTORS
from qwen35_convert.recipe.files import bundled_recipes


def _starting(names: list[str] | tuple[str, ...], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def recipe_names(incomplete: str) -> list[str]:
    """Return the bundled recipes that begin so."""
    return _starting(bundled_recipes(), incomplete)


def scheme_names(incomplete: str) -> list[str]:
    """Return the schemes of `quantize` that begin so."""
    from quant.registry import SCHEMES

    return _starting([*SCHEMES], incomplete)


def levels(incomplete: str) -> list[str]:
    """Return the levels of verification that begin so."""
    return _starting(LEVELS, incomplete)


def devices(incomplete: str) -> list[str]:
    """Return the devices that begin so."""
    return _starting(DEVICES, incomplete)


def executors(incomplete: str) -> list[str]:
    """Return the executors that begin so."""
    return _starting(EXECUTORS, incomplete)


def forms(incomplete: str) -> list[str]:
    """Return the output formats that begin so."""
    from qwen35_convert.output import FORMS

    return _starting(FORMS, incomplete)


def engines(incomplete: str) -> list[str]:
    """Return the engines that begin so."""
    from qwen35_convert.serving.engines import ENGINES

    return _starting([*ENGINES], incomplete)
