"""An artifact's predictions against its source's, on real text, both streamed layer by layer.

Teacher-forced: at every token of the text, the two distributions over the next one. The source is
never in memory whole, nor is the artifact; the table by layer shows where an error enters.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from qwen35_convert.errors import RecipeError
from qwen35_convert.text.tokens import DEFAULT, text_ids
from qwen35_convert.verification.failure import Failure
from qwen35_convert.verification.logits_cache import LogitsCache

if TYPE_CHECKING:
    from torch import Tensor

ROW_TOKENS, MAX_ROWS = 512, 16
# numbers of malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
KEPT, MAPPED_FROM, ARENAS = 32 << 20, 20 << 20, 1


@dataclass(frozen=True, slots=True)
class LogitsCheck:
    """On which text (`default`: the bundled one), and what must hold; None: measured only.

    cache  a folder that keeps what the source's layers make of the text, for its next artifact
    """

    text: str = DEFAULT
    max_kl: float | None = None
    min_top1: float | None = None
    cache: Path | None = None


MEASURED_ONLY = LogitsCheck()


def check_logits(
    artifact: Checkpoint, source: Checkpoint, check: LogitsCheck, progress: Callable[[str], None]
) -> tuple[dict[str, Any], list[Failure]]:
    """Return what was measured, and a failure for each threshold that is not met."""
    import torch

    from runtime.compare import compare_logits

    _use_memory_again()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = token_rows(source, check.text)
    report = compare_logits(
        source,
        artifact,
        rows,
        device=device,
        streams=_streams(source, rows, device, check.cache),
        progress=progress,
    )
    measured = report.as_dict()
    return measured, list(_shortfalls(measured, check))


def _streams(
    source: Checkpoint, rows: Tensor, device: str, cache: Path | None
) -> Callable[[Iterator[Tensor]], Iterator[Tensor]]:
    """Return what gives the source's residual streams for those that would be computed."""
    if cache is None:
        return lambda computed: computed
    return LogitsCache.of(cache, source, rows, device).streams


def _use_memory_again() -> None:
    """Let what a piece of work frees be used by the next, and let larger tensors leave at once.

    The former have up to 17 MB: pages that the kernel maps anew cost 2.7 us each, a third of a
    layer's time. glibc would raise the size from which it maps memory with every layer that is
    freed, and keep that layer. Threads have no heaps of their own, which would keep theirs.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, MAPPED_FROM)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT)
        libc.mallopt(M_ARENA_MAX, ARENAS)


def _shortfalls(measured: dict[str, Any], check: LogitsCheck) -> Iterator[Failure]:
    worst = _steepest(measured["layers"])
    where = f"; the error grows most in layer {worst['layer']} ({worst['kind']})"
    kl, top1 = measured["kl_mean"], measured["top1"]
    if check.max_kl is not None and not kl <= check.max_kl:
        yield Failure("logits", f"mean KL is {kl:.3g}, expected at most {check.max_kl:.3g}{where}")
    if check.min_top1 is not None and not top1 >= check.min_top1:
        yield Failure("logits", f"top-1 agreement is {top1:.4f}, expected {check.min_top1}{where}")


def _steepest(layers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the layer in which the relative error of the residual stream grows most."""
    before = [0.0, *(layer["relative_error"] for layer in layers)]
    return max(layers, key=lambda layer: layer["relative_error"] - before[layer["layer"]])


def token_rows(checkpoint: Checkpoint, text: str) -> Tensor:
    """Return the text's first tokens as rows [N, T]: at most 16 rows of 512, the rest is cut.

    RecipeError if the text cannot be read or is too short.
    """
    import torch

    ids = text_ids(checkpoint, text)
    width = min(ROW_TOKENS, len(ids))
    rows = min(len(ids) // width, MAX_ROWS)
    return torch.tensor(ids[: rows * width]).reshape(rows, width)


def need_source(source: Checkpoint | None) -> Checkpoint:
    """Return the source that a comparison of logits needs. RecipeError if none is named."""
    if source is None:
        raise RecipeError("level logits compares with a source, but none is named (--against)")
    return source
