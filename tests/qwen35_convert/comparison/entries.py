"""Reports made up for tests of tables and pages: every figure is chosen, nothing is run."""

from __future__ import annotations

from dataclasses import replace

from qwen35_convert.comparison.result import Comparison, Entry
from qwen35_convert.failure import Failure
from qwen35_convert.verification.figures import RoleError, Size
from qwen35_convert.verification.verify import Report

KINDS = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
ROLES = ("in_proj_qkv", "gate_proj", "down_proj")
VERSIONS = {"qwen35": "1.2.3", "torch": "4.5.6"}
WEIGHTS = 1000


def entry(name: str, size: int, kl: float | None, *, error: float = 0.03) -> Entry:
    """Return an artifact of so many bytes with this mean KL; None: it was not measured."""
    places = [(f"layers.{i}", i, role) for i in range(len(KINDS)) for role in ROLES]
    roles = [RoleError("embed_tokens", None, "embed", 1, None)]
    roles += [RoleError(*place, 1, error * (1 + place[1])) for place in places]
    lines = [
        {"name": f"{place}.{role}", "stored": f"{place}.{role}.weight", "role": role,
         "scheme": "int4", "relative_rms": error * (1 + layer), "cosine": 0.99, "max_abs": 0.5}
        for place, layer, role in places
    ]  # fmt: skip
    return Entry(
        name,
        Report(
            "logits",
            {},
            lines,
            {},
            [],
            "source",
            None if kl is None else logits(kl),
            size=Size(size + 100, size, WEIGHTS),
            source_size=Size(2200, 2000, WEIGHTS),
            by_role=roles,
        ),
    )


def logits(kl: float) -> dict:
    layers = [
        {"layer": i, "kind": kind, "relative_error": kl * (i + 1), "shared": not kl}
        for i, kind in enumerate(KINDS)
    ]
    return {
        "kl_mean": kl, "kl_stderr": kl / 20, "kl_median": kl / 2, "kl_p999": kl * 30,
        "top1": 1 - kl / 2, "ppl_source": 10.0, "ppl_artifact": 10.0 + kl, "tokens": 4096,
        "text_sha256": "ab" * 32, "layers": layers,
    }  # fmt: skip


def failed(one: Entry, problem: str = "differs") -> Entry:
    """Return an artifact that did not pass."""
    return replace(one, report=replace(one.report, failures=[Failure("layers.0.up", problem)]))


def compared(*entries: Entry, source: str = "Qwen3.5-nano") -> Comparison:
    return replace(Comparison.of(source, "default", entries), versions=VERSIONS)


def several() -> Comparison:
    """Return a comparison like a real one: frontier, a dominated artifact, one without loss."""
    return compared(
        entry("bf16-split", 2000, 0.0, error=0.0017),
        entry("fp8-block", 1100, 0.01, error=0.026),
        entry("gguf-q8_0", 1060, 0.001, error=0.005),
        entry("gguf-q4_k_m", 620, 0.04, error=0.07),
        entry("int4", 600, 0.16, error=0.11),
    )
