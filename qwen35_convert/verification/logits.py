"""An artifact's predictions against its source's, on real text, both streamed layer by layer.

Teacher-forced: at every token of the text, the two distributions over the next one. The source is
never in memory whole, nor is the artifact; the table by layer shows where an error enters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.side_names import TOKENIZER
from qwen35_convert.errors import RecipeError
from qwen35_convert.failure import Failure
from qwen35_convert.run.heap import give_back_heap, share_heap
from qwen35_convert.text.tokens import DEFAULT, text_ids, text_path
from qwen35_convert.verification.limits import Limits, limits_of
from qwen35_convert.verification.logits_cache import LogitsCache
from qwen35_convert.write.digests import sha256_file

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.compare import Kept

ROW_TOKENS, MAX_ROWS = 512, 16
MAPPED_FROM = 20 << 20  # what the next piece of a layer uses again has up to 17 MB
# What a verdict keeps of a measurement.
MEASURED = ("kl_mean", "kl_p999", "top1", "ppl_source", "ppl_artifact", "tokens")


@dataclass(frozen=True, slots=True)
class LogitsCheck:
    """A text to predict (`default`: the bundled one), and thresholds.

    max_kl    mean KL in nats a token, at most; None: the default for how the artifact is stored
    min_top1  top-1 agreement, at least; None: measured only
    keys      what the two are called where they are stated
    cache     a folder that keeps what the source's layers make of the text, for its next artifact

    Raises RecipeError for a threshold that nothing, or everything, meets.
    """

    text: str = DEFAULT
    max_kl: float | None = None
    min_top1: float | None = None
    keys: tuple[str, str] = ("--max-kl", "--min-top1")
    cache: Path | None = None

    def __post_init__(self) -> None:
        max_kl, min_top1 = self.keys
        if self.max_kl is not None and not 0 <= self.max_kl < inf:
            raise RecipeError(max_kl, f"is {self.max_kl}", "a number of nats, 0 or more")
        if self.min_top1 is not None and not 0 <= self.min_top1 <= 1:
            raise RecipeError(min_top1, f"is {self.min_top1}", "a share, 0 to 1")

    @property
    def stated(self) -> tuple[str, ...]:
        """Return what the stated thresholds are called."""
        values = zip(self.keys, (self.max_kl, self.min_top1), strict=True)
        return tuple(key for key, value in values if value is not None)


DEFAULT_LIMITS = LogitsCheck()


def check_logits(
    artifact: Checkpoint, source: Checkpoint, check: LogitsCheck, progress: Callable[[str], None]
) -> tuple[dict[str, Any], list[Failure]]:
    """Return what was measured, and a failure for each limit that is not met."""
    import torch

    from runtime.compare import compare_logits

    share_heap(mapped_from=MAPPED_FROM)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = token_rows(source, check.text)
    with _kept(source, rows, device, check.cache) as kept:
        report = compare_logits(source, artifact, rows, device=device, kept=kept, progress=progress)
    give_back_heap()
    limits = limits_of(artifact, check.max_kl, check.min_top1)
    digest = sha256_file(text_path(check.text))
    measured = report.as_dict() | {"text_sha256": digest, "limits": limits.as_dict()}
    return measured, list(_shortfalls(measured, limits))


def _kept(
    source: Checkpoint, rows: Tensor, device: str, cache: Path | None
) -> AbstractContextManager[Kept]:
    """Return what gives, or keeps, what is computed of the source."""
    from runtime.compare import NOTHING_KEPT

    if cache is None:
        return nullcontext(NOTHING_KEPT)
    return LogitsCache.of(cache, source, rows, device).opened()


def _shortfalls(measured: dict[str, Any], limits: Limits) -> Iterator[Failure]:
    """Yield a failure for each limit that is not met; NaN meets none."""
    where, kl, top1 = _where(measured["layers"]), measured["kl_mean"], measured["top1"]
    if not kl <= limits.max_kl:
        expected = f"at most {limits.max_kl:.3g} ({limits.why})"
        yield Failure("logits", f"mean KL is {kl:.3g}, expected {expected}{where}")
    if limits.min_top1 is not None and not top1 >= limits.min_top1:
        expected = f"at least {limits.min_top1}"
        yield Failure("logits", f"top-1 agreement is {top1:.4f}, expected {expected}{where}")


def _where(layers: list[dict[str, Any]]) -> str:
    """Say in which layer the residual stream becomes NaN, or else its error grows most."""
    errors = [0.0, *(layer["relative_error"] for layer in layers)]
    broken = next((layer for layer in layers if not isfinite(layer["relative_error"])), None)
    worst = broken or max(layers, key=lambda one: one["relative_error"] - errors[one["layer"]])
    what = "the error is not finite from" if broken else "the error grows most in"
    return f"; {what} layer {worst['layer']} ({worst['kind']})"


def token_rows(checkpoint: Checkpoint, text: str) -> Tensor:
    """Return the text's first tokens as rows [N, T]: at most 16 rows of 512, the rest is cut.

    RecipeError if the text cannot be read or is too short, FormatError if the checkpoint's
    tokenizer has tokens that its vocabulary has not.
    """
    import torch

    ids = text_ids(checkpoint, text)
    size = checkpoint.config.sizes["V"]
    if max(ids) >= size:
        raise FormatError(f"{TOKENIZER} gives token {max(ids)}, but the vocabulary has {size}")
    width = min(ROW_TOKENS, len(ids))
    rows = min(len(ids) // width, MAX_ROWS)
    return torch.tensor(ids[: rows * width]).reshape(rows, width)
