"""What a proof is about: an artifact, its source, its receipt, and what it is expected to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from formats.errors import Qwen35Error
from qwen35_convert.calibration.scales import needs_inputs, with_scales
from qwen35_convert.calibration.texts import Texts, text_at_hand
from qwen35_convert.containers.registry import container_of, expect
from qwen35_convert.failure import Failure
from qwen35_convert.levels import STRUCTURE
from qwen35_convert.planning.dressed import dressed
from qwen35_convert.planning.lost_scales import check_scales
from qwen35_convert.planning.plan import Plan
from qwen35_convert.planning.shifted_norms import check_norms
from qwen35_convert.verification.compare import Compared
from qwen35_convert.verification.diagnose import wrong_source
from qwen35_convert.verification.levels import Level, effective_level
from qwen35_convert.verification.logits import DEFAULT_LIMITS, LogitsCheck
from qwen35_convert.verification.receipts import (
    Receipt,
    check_adapter,
    near_places,
    output_places,
    read_receipt,
)
from qwen35_convert.versions import version
from qwen35_convert.write.digests import Digests

if TYPE_CHECKING:
    from torch import Tensor

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Checks:
    """How far to look: the level, what the logits must meet, threads, whom to tell.

    expected     what it is to be, where that is known; else it follows from the receipt
    texts        the text of what is expected, where it has been read
    calibration  what the receipt is going to say of it
    by_bounds    what a text gave is judged, the text is not run again
    hashes       of files that this process has just read
    """

    level: str = "tensors"
    logits: LogitsCheck = DEFAULT_LIMITS
    workers: int = 1
    progress: Progress = lambda _: None
    expected: Plan | None = None
    texts: Texts | None = None
    calibration: Mapping[str, Any] | None = None
    by_bounds: bool = False
    hashes: Mapping[Path, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        effective_level(self.level, self.logits)

    @property
    def effective(self) -> Level:
        """Return the level that is verified."""
        return effective_level(self.level, self.logits)


@dataclass(slots=True)
class Proof:
    """One artifact on trial, and what the checks have come to.

    digests   of the files that the receipt lists, which are begun first and needed last
    receipt   None: there is none, or none that can be read
    expected  the artifact that its recipe makes of the source; None: not known
    texts     the text that its recipe reads, where it is at hand
    no_text   why it is not
    notes     what is right, but not as an engine takes it
    """

    artifact: Checkpoint
    source: Checkpoint | None
    checks: Checks
    digests: Digests
    receipt: Receipt | None = None
    expected: Plan | None = None
    failures: list[Failure] = field(default_factory=list)
    compared: list[Compared] = field(default_factory=list)
    logits: dict[str, Any] | None = None
    calibration: dict[str, Any] | None = None
    cache: dict[str, Any] | None = None
    texts: Texts | None = None
    no_text: str | None = None
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(
        artifact: Checkpoint, source: Checkpoint | None, checks: Checks, digests: Digests
    ) -> Proof:
        """Read the receipt, and expect what it promises; a source of another model is set aside.

        RecipeError if it was made with an adapter, and the source is the base model alone.
        """
        other = wrong_source(artifact, source) if source is not None else None
        if other is not None:
            return Proof(artifact, None, checks, digests, failures=[other])
        proof = Proof(artifact, source, checks, digests)
        proof.expected, proof.texts = checks.expected, checks.texts
        if proof.expected is None:
            receipt = read_receipt(artifact)
            if isinstance(receipt, Failure):
                proof.failures.append(receipt)
            else:
                proof.receipt = receipt
                check_adapter(receipt, source)
        basis = proof.expected or proof.receipt
        if source is not None and basis is not None:
            proof.source = source = dressed(source, basis.recipe)
        if proof.receipt is not None:
            proof._begin_digests(proof.receipt)
        if proof.receipt is not None and source is not None and proof.receipt.names(source):
            proof.failures += proof._expect(proof.receipt, source)
        return proof

    def _begin_digests(self, receipt: Receipt) -> None:
        if self.checks.effective.name == STRUCTURE:  # which reads no file whole
            return
        places = list(output_places(receipt, self.artifact).values())
        if self.source is not None and receipt.names(self.source):
            places += near_places(receipt, self.source).values()
        self.digests.begin(places)

    def _expect(self, receipt: Receipt, source: Checkpoint) -> Iterator[Failure]:
        """Make the plan again, if this version is the one that made the artifact."""
        if receipt.version != version():
            return
        whole = container_of(self.artifact).whole(self.artifact)
        # the source's folder may have been moved since
        named = replace(source, name=receipt.title or self.artifact.name)
        try:
            plan = expect(named, receipt.recipe, whole)
            if self.checks.effective.name == STRUCTURE:  # which reads headers and side files alone
                self.expected = plan
                return
            check_norms(source)
            check_scales(source)
            self.expected = self._with_text(plan, receipt, source)
        except Qwen35Error as error:
            yield Failure(receipt.path.name, f"names a recipe that this source refuses: {error}")

    def _with_text(self, plan: Plan, receipt: Receipt, source: Checkpoint) -> Plan | None:
        """Return the plan with what its text says; None: it is nothing without the text."""
        calibrate, inputs = plan.recipe.quantize.calibrate, needs_inputs(plan)
        if calibrate is None:
            return plan
        texts = text_at_hand(source, calibrate, receipt.calibration)
        if isinstance(texts, str):
            self.no_text = texts
            if not inputs:
                return plan
            claims = {"method": plan.recipe.quantize.method, "proof": "bounds", "why": texts}
            self.calibration = claims | {"layers": 0, "layers_again": 0}
            return None
        self.texts = texts
        if self.checks.by_bounds and not inputs:
            self.no_text = "as was asked for"
            return plan
        return with_scales(plan, source, texts, self.checks.workers)

    @property
    def only(self) -> str | None:
        """Which tensors the artifact is a slice of on purpose, as a glob; None: it is whole."""
        basis = self.expected or self.receipt
        return basis.recipe.only if basis else None

    @property
    def importance(self) -> Mapping[str, Tensor]:
        """By atom, the importance of the columns that the artifact was encoded with."""
        return self.expected.importance if self.expected else {}
