"""What `bench` is asked to time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from qwen35_convert.errors import RecipeError
from qwen35_convert.recipe.parts import LONGEST, BenchSweep

CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to time: prompts of these lengths, batches of these sizes at this context.

    device       cuda or cpu
    dynamic_fp8  quantise the inputs of FP8 weights in prompts (W8A8)
    peer         another engine to run on the same weights: transformers, fla, vllm
    lock         a file to lock, so that several can load at once and time one after another
    """

    prefill: tuple[int, ...] = BenchSweep().prefill
    batch: tuple[int, ...] = BenchSweep().batch
    context: int = CONTEXT
    device: str = "cuda"
    dynamic_fp8: bool = True
    peer: str | None = None
    lock: Path | None = None

    def __post_init__(self) -> None:
        for name, values in (
            ("prefill", self.prefill),
            ("batch", self.batch),
            ("context", (self.context,)),
        ):
            wrong = next((v for v in values if not 1 <= v <= LONGEST), None)
            if wrong is not None:
                raise RecipeError(name, f"is {wrong}", f"1 to {LONGEST}")
