"""The receipt beside every artifact: what made it, from what, and what it is, by hash.

It holds no time and no path of a machine: the same source and recipe give the same receipt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from quant.measure import Error
from qwen35_convert.plan import Plan

RECEIPT = "qwen35-receipt.json"
HASH_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a source came from on the hub; empty for a local folder."""

    repo: str | None = None
    revision: str | None = None


def version() -> str:
    """Return the installed version of qwen35."""
    try:
        return metadata.version("qwen35")
    except metadata.PackageNotFoundError:
        return "0+checkout"


def sha256_file(path: Path) -> str:
    """Return the hex SHA-256 of a file, read in constant memory."""
    digest, buffer = hashlib.sha256(), bytearray(HASH_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()


def describe_files(paths: Iterable[Path], workers: int) -> dict[str, dict[str, Any]]:
    """Return size and SHA-256 of each file by its name."""
    listed = sorted(paths)
    with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
        hashes = list(pool.map(sha256_file, listed))
    return {
        path.name: {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(listed, hashes, strict=True)
    }


def make_receipt(
    plan: Plan, origin: Origin, errors: Mapping[str, Error],
    source_files: dict[str, Any], output_files: dict[str, Any],
) -> bytes:  # fmt: skip
    """Return the receipt's bytes."""
    receipt = {
        "qwen35": version(),
        "recipe": plan.recipe.model_dump(mode="json"),
        "source": {"repo": origin.repo, "revision": origin.revision, "files": source_files},
        "output": {"files": output_files},
        "errors": {scheme: error.as_dict() for scheme, error in sorted(errors.items())},
        "dropped": plan.dropped,
    }
    return dump_json(receipt)


def dump_json(value: Any) -> bytes:
    """Return JSON as it is written everywhere: two spaces, keys as given, final newline."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
