"""What calibration saw in each layer: a digest of its sums, and how many tokens reached experts.

It is kept in the work folder until the artifact is sealed: one line of JSON for each layer, durable
before the layer's weights are in the journal. A torn last line is ignored; of a layer that is there
twice the later counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen35_convert.calibration.device import device_name
from qwen35_convert.calibration.texts import Texts
from qwen35_convert.durable import append_to_file, sync_folder, writing
from qwen35_convert.planning.calibrated import stage_order

MAX_TOLD = 8


@dataclass(frozen=True, slots=True)
class Fallback:
    """Why weights get another method than the one asked for."""

    tokens: int
    method: str

    def __str__(self) -> str:
        return f"received {self.tokens} tokens: {self.method}"


@dataclass(slots=True)
class Seen:
    """One layer.

    sha256    of all that its weights were encoded with: sums in float32, and factors
    experts   tokens of the least and of the most used expert; None: it has none
    fallback  by weight
    """

    stage: str
    sha256: str = ""
    experts: tuple[int, int] | None = None
    fallback: dict[str, Fallback] = field(default_factory=dict)

    def count(self, tokens: int) -> None:
        """Count the tokens of an expert."""
        least, most = self.experts or (tokens, tokens)
        self.experts = min(least, tokens), max(most, tokens)

    def as_dict(self) -> dict[str, Any]:
        """Return what a receipt says of the layer."""
        told: dict[str, Any] = {"sums_sha256": self.sha256}
        if self.experts is not None:
            told["expert_tokens"] = dict(zip(("least", "most"), self.experts, strict=True))
        return told | {"fallback": {n: str(why) for n, why in by_module(self.fallback).items()}}

    def note(self) -> str | None:
        """Say which weights saw too few tokens, None if all saw enough."""
        few = [f"{name} {why}" for name, why in by_module(self.fallback).items()]
        more = f" and {len(few) - MAX_TOLD} more" if few[MAX_TOLD:] else ""
        return "; ".join(few[:MAX_TOLD]) + more if few else None


def by_module(fallback: Mapping[str, Fallback]) -> dict[str, Fallback]:
    """Return experts in place of their weights, where all of these fare alike."""
    modules: dict[str, list[str]] = {}
    for name in fallback:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    told: dict[str, Fallback] = {}
    for module, names in modules.items():
        whole = len(names) == 3 and len({fallback[name] for name in names}) == 1
        told |= {module: fallback[names[0]]} if whole else {name: fallback[name] for name in names}
    return told


def append_seen(path: Path, seen: Seen, left: str) -> None:
    """Add a layer, durably. OutputError if the disk fails."""
    line = json.dumps({"stage": seen.stage, "seen": seen.as_dict()})
    with writing(path, "writing what calibration saw", left):
        append_to_file(path, f"\n{line}\n".encode())  # the line before may be torn
        sync_folder(path.parent)


def receipt_of(path: Path, method: str, device: str, texts: Texts) -> dict[str, Any]:
    """Return what a receipt says of a calibration whose layers are all in the file."""
    layers = dict(_parsed(path.read_text().split("\n")[:-1]))
    return {
        "method": method,
        "device": device_name(device),
        **texts.as_dict(),
        "layers": dict(sorted(layers.items(), key=lambda pair: stage_order(pair[0]))),
    }


def _parsed(lines: Iterable[str]) -> Iterable[tuple[str, dict[str, Any]]]:
    for line in lines:
        try:
            told = json.loads(line)
        except json.JSONDecodeError:  # blank, or torn by a crash and written again since
            continue
        yield told["stage"], told["seen"]
