"""What the page says in words: the result in a sentence, what failed, what the figures are."""

from __future__ import annotations

from collections.abc import Iterator

from qwen35_convert.comparison.result import Comparison, Entry
from qwen35_convert.page.element import Node, add, element
from qwen35_convert.page.scale import figure
from qwen35_convert.sizes import size_text

MOST_FAILURES = 5
HASH_SHOWN = 12
KL = (
    "KL divergence, KL(source || artifact), compares the two next-token distributions at every "
    "token of the text, in nats. Both models run in float32 and see the true text as context."
)
ERROR = (
    "\u00b1 is one standard error of the mean, estimated from blocks of 128 tokens. All artifacts "
    "see the same tokens, so a difference between two of them is more certain than either value."
)
COLUMNS = (
    "Half of the tokens have a KL divergence below the median, 99.9 % below that column. Top-1 is "
    "how often artifact and source agree on the most likely token. PPL ratio is the artifact's "
    "perplexity divided by the source's."
)
LIMITS = (
    "This is one text: other languages, tasks and long contexts may rank the artifacts "
    "differently. KL divergence is not a capability score. Speed and memory were not measured."
)
SIZE = (
    "Size and bits per weight count the language model (weights, scales, norms) without vision "
    "and MTP."
)
PROOF = "Verified: the artifact was reopened and every tensor compared with the source."
BOUNDS = "bounds"  # a calibration that was not run again
JUDGED = "calibrated weights were judged by what any encoder of their scheme may do."
UNMEASURED = "Predictions were not measured; verify --level logits measures them."


def title(comparison: Comparison) -> str:
    """Return the page's heading."""
    entries = comparison.entries
    if len(entries) == 1:
        return f"{entries[0].name} compared with {comparison.source}"
    return f"{comparison.source}: {len(entries)} artifacts compared"


def summary(comparison: Comparison) -> Iterator[Node]:
    """Yield the result in a paragraph."""
    if comparison.measured is None:
        yield element("p", UNMEASURED, class_="lead")
        return
    best = [one for one in comparison.entries if one.frontier]
    if len(comparison.entries) == 1:
        yield element("p", _told(comparison.entries[0]), ".", class_="lead")
        return
    count = f"{len(best)} of {len(comparison.entries)} artifacts are on the frontier"
    lead = f"{count}: nothing smaller is closer to the source. Smallest first:"
    yield element("p", lead, class_="lead")
    yield add(element("ol", class_="best"), [element("li", _told(one)) for one in best])


def _told(one: Entry) -> Node:
    size = one.report.size
    kl = f" \u2013 {size_text(size.model)}, {size.bits:.2f} bits, KL {figure(one.kl)}"
    return element("span", element("b", one.name), kl)


def hint() -> Node:
    """Return how the table is to be read."""
    bold = element("b", "bold")
    return element("p", "Smallest first; ", bold, " rows are on the frontier.", class_="hint")


def failures(comparison: Comparison) -> Iterator[Node]:
    """Yield what verification found wrong with each artifact."""
    for one in comparison.entries:
        if one.report.passed:
            continue
        failures = one.report.failures
        lines = [element("li", f"{f.tensor}: {f.problem}") for f in failures[:MOST_FAILURES]]
        more = len(failures) - MOST_FAILURES
        rest = element("li", f"and {more} more") if more > 0 else None
        yield element("h3", one.name)
        yield element("ul", *lines, rest, class_="bad")


def basis(comparison: Comparison) -> Iterator[Node]:
    """Yield what was measured, on what, and what that does not say."""
    sentences = [
        _source(comparison),
        _text(comparison),
        KL,
        ERROR,
        COLUMNS,
        _calibrated(comparison),
        LIMITS,
    ]
    measured = comparison.measured is not None
    shown = sentences if measured else [sentences[0]]
    passed = sum(one.report.passed for one in comparison.entries)
    shown += [SIZE, f"{PROOF} {passed} of {len(comparison.entries)} passed."]
    shown += _proofs(comparison)
    for sentence in filter(None, shown):
        yield element("p", sentence)
    names = ", ".join(f"{name} {number}" for name, number in comparison.versions.items())
    yield element("p", f"Made with {names}.", class_="versions")


def _proofs(comparison: Comparison) -> Iterator[str]:
    """Say where less was computed than for the others, and what was checked instead."""
    for one in comparison.entries:
        if one.num_shared:
            yield (
                f"{one.name}: {one.num_shared} of {len(one.layers)} layers hold the source's own "
                "weights. These were compared bit for bit, and the layers run once for both."
            )
        if (one.report.calibration or {}).get("proof") == BOUNDS:
            yield f"{one.name}: {JUDGED}"


def _source(comparison: Comparison) -> str:
    size = next((o.report.source_size for o in comparison.entries if o.report.source_size), None)
    facts = f": {size_text(size.model)}, {size.bits:.2f} bits per weight" if size else ""
    return f"The source is {comparison.source}{facts}."


def _text(comparison: Comparison) -> str:
    measured = comparison.measured
    if measured is None:
        return ""
    digest = measured["text_sha256"][:HASH_SHOWN]
    return (
        f"The text is {comparison.text}, its first {measured['tokens']:,} tokens "
        f"(SHA-256 {digest}\u2026); the source's perplexity on it is "
        f"{figure(measured['ppl_source'])}."
    )


def _calibrated(comparison: Comparison) -> str:
    names = [one.name for one in comparison.entries if one.calibrated]
    verb = "was" if len(names) == 1 else "were"
    warning = f"{', '.join(names)} {verb} calibrated on this same text: the figures are too good."
    return warning if names else ""
