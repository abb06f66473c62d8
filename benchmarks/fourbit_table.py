"""The figures of `benchmarks.fourbit` as a table in Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# Of the quantised weights, scales included; a shared scale of a whole matrix is nothing.
BITS = {"nvfp4a16": 4.5, "mxfp4a16": 4.25, "int4": 4.125, "int4-g32": 4.625, "int8": 8}
Key = tuple[str, str, str]


def print_table(results: Path) -> None:
    """Print a table for each part of the texts; of figures that are there twice the later count."""
    found = [json.loads(line) for line in results.read_text().splitlines()]
    for part in dict.fromkeys(line["part"] for line in found):
        last = {(*_key(line), line["model"]): line for line in found if line["part"] == part}
        models = list(dict.fromkeys(key[3] for key in last))
        print(f"\n{part}: mean KL ± standard error / 99.9 % / top-1 %\n")
        print(f"| scheme | bits | method | {' | '.join(models)} | weight RMS, % |")
        print("|---|---|---|" + "---|" * (len(models) + 1))
        rows = {key[:3] for key in last}
        for key in sorted(rows, key=lambda key: (list(BITS).index(key[0]), key)):
            _print_row(key, [last.get((*key, model)) for model in models])


def _key(line: dict[str, Any]) -> Key:
    return line["scheme"], line["tool"], line["method"]


def _print_row(key: Key, row: list[dict[str, Any] | None]) -> None:
    scheme, tool, method = key
    there = [line for line in row if line and "kl" in line]
    rms = " / ".join(f"{line['weight_rms'] * 100:.2f}" for line in there)
    cells = " | ".join(_cell(line) for line in row)
    print(f"| {scheme} | {BITS[scheme]} | {tool}, {method} | {cells} | {rms} |")


def _cell(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    if "kl" not in line:
        return line["failed"]
    digits = 4 if line["kl"] >= 0.002 else 5
    mean = f"{line['kl']:.{digits}f} ± {line['kl_se']:.{digits}f}"
    return f"{mean} / {line['kl_p999']:.3f} / {line['top1'] * 100:.1f}"
