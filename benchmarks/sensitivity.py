"""Hold the KL that `qwen35 sensitivity` predicts against the KL of random mixes.

    python -m benchmarks.sensitivity SOURCE [--recipe NAME] [--forms A,B] [--chunks N] [--text FILE]

A mix gives every unit one of its forms at random. `all` draws from all of them. `bits` draws a
number of bits first, from 2.5 or the smallest form's to 8.5, and then of each unit the form below
or above it, as often as makes that many bits: such mixes are made by sizes. A mix is rounded in
memory and run over the text; --text may be another text than the bundled one, on which costs are
predicted. One JSON line goes to benchmarks/results/sensitivity.jsonl: Spearman's rank correlation,
and the ratio of measured to predicted KL.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.convert import commit
from benchmarks.lines import record
from qwen35_convert.containers.registry import CONTAINERS, open_checkpoint
from qwen35_convert.fit.measure import Means, measure
from qwen35_convert.fit.probes import Probes
from qwen35_convert.fit.rounded import Rounder
from qwen35_convert.fit.sensitivity import forms_of
from qwen35_convert.fit.sizes import Sizes, sizes_of
from qwen35_convert.recipe.recipe import read_recipe
from qwen35_convert.verification.logits import token_rows

RESULTS = Path(__file__).parent / "results" / "sensitivity.jsonl"
LOW, HIGH = 2.5, 8.5


def main() -> None:
    """Measure, print, keep the line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--recipe", default="gguf-q8_0")
    parser.add_argument("--set", dest="set_", nargs="*", default=[])
    parser.add_argument("--forms", default="")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--text", default="default")
    parser.add_argument("--mixes", type=int, default=60)
    options = parser.parse_args()
    line = run(options)
    record(RESULTS, line)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return how predictions and measurements agree."""
    from runtime.imatrix import collect

    source, recipe = open_checkpoint(options.source), read_recipe(options.recipe, options.set_)
    out = Path(f"m{CONTAINERS[recipe.export.format].ending}")
    forms = forms_of(recipe.export.format, [f for f in options.forms.split(",") if f])
    sizes = sizes_of(source, recipe, out, forms)
    rows = token_rows(source, "default")[: options.chunks]
    held_out = token_rows(source, options.text)[: options.chunks]
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(source, sizes, rows, Means("cpu", 2, Path(folder)))
        rounder = Rounder(source, recipe, collect(source, list(rows)))
        probes = Probes(source, rounder, held_out, "cpu", Path(folder))
        drawn = {
            how: compared(measured, sizes, probes, how, options.mixes) for how in ("all", "bits")
        }
    return {
        "what": "sensitivity", "source": options.source.name, "recipe": recipe.name,
        "imatrix": recipe.quantize.imatrix is not None, "forms": forms, "units": len(sizes.units),
        "tokens": rows.numel(), "text": Path(options.text).name, "mixes": options.mixes,
        "commit": commit(), **drawn,
    }  # fmt: skip


def compared(measured: Any, sizes: Sizes, probes: Probes, how: str, count: int) -> dict[str, Any]:
    """Return the agreement over random mixes."""
    pick, pairs = random.Random(0), []
    known = {
        unit.name: {f: 8 * size / unit.elements for f, size in unit.sizes.items()
                    if measured.cost(unit.name, f) is not None}
        for unit in sizes.units
    }  # fmt: skip
    low = max(LOW, statistics.median(min(bits.values()) for bits in known.values()))
    for _ in range(count):
        bits = None if how == "all" else pick.uniform(low, HIGH)
        mix = {unit.name: drawn(known[unit.name], pick, bits) for unit in sizes.units}
        rounded = {item.atom.name: (item, mix[unit.name])
                   for unit in sizes.units for item in unit.items}  # fmt: skip
        predicted = sum(measured.cost(name, form) for name, form in mix.items())
        pairs.append((predicted, probes.kl(rounded)))
    told, got = map(list, zip(*pairs, strict=True))
    ratios = sorted(b / a for a, b in zip(told, got, strict=True))
    return {
        "rank_correlation": round(spearman(told, got), 4),
        "kl": [float(f"{x:.3g}") for x in (min(got), statistics.median(got), max(got))],
        "measured_by_predicted": [
            round(x, 3) for x in (ratios[0], statistics.median(ratios), ratios[-1])
        ],
    }


def drawn(forms: Mapping[str, float], pick: random.Random, bits: float | None) -> str:
    """Return a form: any, or the one below or above a number of bits, which is its mean.

    forms  bits of each
    """
    if bits is None:
        return pick.choice(sorted(forms, key=lambda form: forms[form]))
    below = max((b for b in forms.values() if b <= bits), default=min(forms.values()))
    above = min((b for b in forms.values() if b >= bits), default=max(forms.values()))
    share = (bits - below) / (above - below) if above > below else 0.0
    wanted = above if pick.random() < share else below
    return pick.choice(sorted(form for form, size in forms.items() if size == wanted))


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the correlation of ranks."""
    return statistics.correlation(ranks(a), ranks(b))


def ranks(values: Sequence[float]) -> list[float]:
    """Return the place of each value in their order; the same values have their mean place."""
    places: dict[float, list[int]] = defaultdict(list)
    for place, value in enumerate(sorted(values)):
        places[value].append(place)
    return [statistics.mean(places[value]) for value in values]


if __name__ == "__main__":
    main()
