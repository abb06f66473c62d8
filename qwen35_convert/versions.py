"""Which versions a command runs with, read from package metadata: nothing is imported for it."""

from __future__ import annotations

import platform
from functools import cache

BESIDE = ("torch", "triton", "numba")


def version() -> str:
    """Return the installed version of qwen35."""
    return version_of("qwen35") or "0+checkout"


@cache
def version_of(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str]:
    """Return the versions that figures depend on, by name; of what is installed."""
    beside = ((name, version_of(name)) for name in BESIDE)
    return {"qwen35": version(), "python": platform.python_version()} | {
        name: number for name, number in beside if number
    }


def version_line() -> str:
    """Return the versions that a report of a bug needs, in a line."""
    beside = (f"{name} {version_of(name) or 'not installed'}" for name in BESIDE)
    return f"qwen35 {version()} (Python {platform.python_version()}, {', '.join(beside)})"
