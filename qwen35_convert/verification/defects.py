"""What is stored, judged by itself: scales, codes, shapes and values that cannot be right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from formats.checkpoint import Checkpoint
from formats.family.activation_scales import INPUTS, scaled_by
from formats.family.layout import Atom
from quant.opening import open_value
from quant.stored import scheme_of
from qwen35_convert.failure import Failure
from qwen35_convert.run.threads import each
from qwen35_convert.verification.proof import Proof

PLAIN, ZERO_POINT = ("BF16", "F16", "F32"), "zero_point"


def defects(proof: Proof) -> Iterator[Failure]:
    """Yield the defects of every atom that was not just made again."""
    rest = not_made_again(proof)
    for failures in each(partial(_defects_of, proof.artifact), rest, proof.checks.workers):
        yield from failures
    yield from _of_inputs(proof.artifact)


def not_made_again(proof: Proof) -> list[str]:
    """Return the atoms but those that were just made again, equal to the byte."""
    sure = (c.name for c in proof.compared if not c.faults and not c.by_bounds)
    made = set(sure) if proof.expected else set()
    return [name for name in proof.artifact.layout.atoms if name not in made]


def _defects_of(artifact: Checkpoint, name: str) -> list[Failure]:
    atom = artifact.layout.atoms[name]
    value = open_value(artifact, atom)
    keys = [part.key for part in value.scheme.parts("", (1, 1))]
    stored = dict(zip(keys, atom.parts, strict=True))
    counts: Counter[tuple[str, str]] = Counter()
    for start, stop in value.chunks(1):
        for key, (defect, count) in value.scheme.defects(value.stored(start, stop)).items():
            counts[key, defect] += count
        value.release(start, stop)
    failures = [Failure(stored[key], f"has {n} {defect}") for (key, defect), n in counts.items()]
    return [*failures, *_constants_of(artifact, atom)]


def _of_inputs(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield the scales of inputs, which no weight depends on, that are no scales."""
    for name in artifact.layout.activation_scales:
        plain = artifact.infos()[name].dtype in PLAIN and not name.endswith(ZERO_POINT)
        if scaled_by(name) == INPUTS and plain:
            scale = artifact.load(name, artifact.read(name), ...).float()
            bad = int((~(scale.isfinite() & (scale > 0))).sum())
            if bad:
                yield Failure(name, f"has {bad} scales that are not finite and positive")


def _constants_of(artifact: Checkpoint, atom: Atom) -> Iterator[Failure]:
    """Hold what follows from a weight's shape against what is stored: decoding reads none of it."""
    parts = scheme_of(atom).parts(atom.weight, atom.whole or atom.shape)
    for part, name in zip(parts, atom.parts, strict=True):
        if part.constant is not None:
            content = artifact.load(name, artifact.read(name), ...).tolist()
            if content != list(part.constant):
                yield Failure(name, f"is {content}, expected {list(part.constant)}")
