"""The receipt beside every artifact: its recipe, its source and its files, by hash.

It holds no time and no path of a machine: the same source and recipe give the same receipt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.safetensors.adapters import ADAPTER_FILES
from qwen35_convert.versions import version

if TYPE_CHECKING:
    from qwen35_convert.planning.plan import Plan

RECEIPT = "qwen35-receipt.json"
HALF_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Origin:
    """The repository and commit of a source on the hub; empty for a local folder.

    hashes   of the files that were fetched: their SHA-256, which was computed then
    adapter  the same of what is merged into it; None: nothing is
    """

    repo: str | None = None
    revision: str | None = None
    hashes: Mapping[str, str] = field(default_factory=dict)
    adapter: Origin | None = None

    @property
    def known(self) -> dict[str, str]:
        """The hashes of all files that were fetched."""
        return {**self.hashes, **(self.adapter.hashes if self.adapter else {})}

    def describe(self, files: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """Return what a receipt says of a source."""
        return {"repo": self.repo, "revision": self.revision, **more, "files": {**files}}


@dataclass(frozen=True, slots=True)
class Proof:
    """What a conversion's own verification found; None where it was left out.

    schemes  the errors measured, by scheme
    """

    verdict: Mapping[str, Any] | None = None
    schemes: Mapping[str, Any] | None = None


def receipt_name(out: Path) -> str:
    """Return the name of a GGUF file's receipt, which lies beside it."""
    return f"{out.name}.receipt.json"


@dataclass(frozen=True, slots=True)
class Draft:
    """What a receipt says but for the files of the artifact.

    source_files  size and hash of every file that was read, an adapter's among them
    calibration   what a text that calibrated came to
    """

    plan: Plan
    origin: Origin
    source_files: Mapping[str, Any]
    proof: Proof
    calibration: Mapping[str, Any] | None = None

    def receipt(self, output_files: Mapping[str, Any]) -> dict[str, Any]:
        """Return the receipt of an artifact that has these files."""
        plan, origin = self.plan, self.origin
        titled = {} if plan.title is None else {"title": plan.title}
        own = {name: self.source_files[name] for name in ADAPTER_FILES if origin.adapter}
        base = {name: entry for name, entry in self.source_files.items() if name not in own}
        return {
            "qwen35": version(),
            "recipe": plan.recipe.model_dump(mode="json"),
            "source": origin.describe(base, **titled),
            **({"adapter": origin.adapter.describe(own)} if origin.adapter else {}),
            "output": {"files": {**output_files}},
            "verdict": self.proof.verdict,
            "errors": self.proof.schemes,
            "dropped": plan.dropped,
            **({} if self.calibration is None else {"calibration": self.calibration}),
        }


def dump_json(value: Any) -> bytes:
    """Return JSON as it is written everywhere: two spaces, keys as given, final newline.

    NaN and infinity, which JSON has not, become null; half a surrogate pair, which UTF-8 has not,
    stays an escape.
    """
    try:
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False)
    try:
        return f"{text}\n".encode()
    except UnicodeEncodeError:
        return HALF_PAIR.sub(lambda half: f"\\u{ord(half[0]):04x}", f"{text}\n").encode()


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value
