"""Plans, inspections and reports as plain text of stable width."""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from formats.family.names import optional_part
from formats.stored import KEEP, Problem, by_cause, tell
from qwen35_convert.inspection.screen import lines, start_lines
from qwen35_convert.sizes import size_text
from qwen35_convert.write.receipt import dump_json

if TYPE_CHECKING:
    from pathlib import Path

    from qwen35_convert.artifact import Conversion
    from qwen35_convert.benchmarking.bench import Bench
    from qwen35_convert.containers.gguf.imatrix_file import ImatrixReport
    from qwen35_convert.fit.sensitivity import Sensitivity
    from qwen35_convert.inspection.inspect import Inspection
    from qwen35_convert.planning.plan import Plan, Shard
    from qwen35_convert.publish import Uploaded
    from qwen35_convert.verification.verify import Report

MAX_LISTED = 20
SCHEMA_VERSION = (
    1  # of every JSON object that a command prints; another meaning of a key is a new one
)


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object on stdout, with the version of what its keys mean."""
    sys.stdout.write(dump_json({"schema_version": SCHEMA_VERSION, **value}).decode())


def print_notes(plan: Plan) -> None:
    """Print the notes of a plan on stderr."""
    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)


@dataclass
class _Line:
    tensors: int = 0
    after: int = 0


def plan_text(plan: Plan) -> str:
    """Return the plan as a table by role, with what is kept and why."""
    lines = [f"{'role':<20}{'tensors':>8}  {'from':<6} {'to':<12}{'bytes':>12}  why"]
    for (role, dtype, scheme, reason), line in _by_role(plan).items():
        to = dtype.lower() if scheme == KEEP else scheme
        lines.append(
            f"{role:<20}{line.tensors:>8}  {dtype.lower():<6} {to:<12}"
            f"{size_text(line.after):>12}  {reason}"
        )
    lines += [f"dropped: {count} tensors of {group}" for group, count in plan.dropped.items()]
    lines += [f"note: {note}" for note in plan.notes]
    files = "1 file" if len(plan.shards) == 1 else f"{len(plan.shards)} files"
    lines.append(f"{len(plan.tensors)} tensors, {size_text(plan.nbytes)} in {files}")
    return "\n".join([*lines, "Only headers and layer norms were read; nothing was written."])


def _by_role(plan: Plan) -> dict[tuple[str, str, str, str], _Line]:
    table: dict[tuple[str, str, str, str], _Line] = defaultdict(_Line)
    for item in plan.items:
        line = table[item.atom.role, item.atom.dtype, item.scheme.name, item.reason]
        line.tensors += 1
        line.after += sum(output.nbytes for output in item.outputs)
    return table


def plan_as_dict(plan: Plan) -> dict[str, Any]:
    """Return the plan item by item, as `--plan --json` prints it."""
    return {
        "recipe": plan.recipe.model_dump(mode="json"),
        "files": {shard.name: shard.nbytes for shard in plan.shards},
        "rows": [
            {
                "name": item.atom.name,
                "role": item.atom.role,
                "source": item.atom.stored,
                "dtype": item.atom.dtype,
                "shape": list(item.atom.shape),
                "scheme": item.scheme.name,
                "reason": item.reason,
                "outputs": [output.name for output in item.outputs],
            }
            for item in plan.items
        ],
        "dropped": plan.dropped,
        "notes": list(plan.notes),
    }


def print_conversion(done: Conversion) -> None:
    """Print where the artifact is, and the report of its verification."""
    tensors, size = len(done.plan.tensors), size_text(done.plan.nbytes)
    print(f"{done.out}: {tensors} tensors, {size}, recipe {done.plan.recipe.name}")
    for shard in _vision_files(done):
        path, size = done.out.with_name(shard.name), size_text(shard.nbytes)
        print(f"{path}: {len(shard.infos)} of these tensors, {size}: vision, for --mmproj")
    if done.report:
        print_report(done.report)


def _vision_files(done: Conversion) -> list[Shard]:
    """Return the files beside a file that hold the vision tower alone."""
    if done.out.is_dir():
        return []
    items = (item for item in done.plan.items if optional_part(item.atom.hub) == "vision")
    vision = {output.name for item in items for output in item.outputs}
    return [s for s in done.plan.shards if vision.issuperset(info.name for info in s.infos)]


def print_checks(*, json: bool) -> None:
    """Print the table of checks: id, level, what it catches, the test that plants it."""
    from qwen35_convert.verification.table import CHECKS

    if json:
        print_json({"checks": [check.as_dict() for check in CHECKS]})
        return
    for check in CHECKS:
        print(f"{check.id:<10} {check.level:<10} {check.catches} ({check.planted})")


def print_report(report: Report) -> None:
    """Print a verification report: schemes, logits, failures, the level."""
    from qwen35_convert.verification.screen import report_lines

    for line in report_lines(report):
        print(line)


def print_upload(uploaded: Uploaded) -> None:
    """Print every file of an upload, and where it is."""
    for name, nbytes in uploaded.files.items():
        print(f"{size_text(nbytes):>10}  {name}")
    total = size_text(sum(uploaded.files.values()))
    where = uploaded.commit or f"{uploaded.repo} (dry run: nothing was sent)"
    print(f"{total:>10}  {len(uploaded.files)} files: {where}")


def print_imatrix(matrix: ImatrixReport, *, notes: bool) -> None:
    """Print the size of an importance matrix, and the experts that it does not cover."""
    print(
        f"{matrix.out}: {matrix.tensors} tensors, {matrix.tokens} tokens in {matrix.chunks} chunks"
    )
    if matrix.unseen and notes:
        some = ", ".join(matrix.unseen[:MAX_LISTED])
        print(f"note: no token reached {len(matrix.unseen)} experts: {some}", file=sys.stderr)


def print_sensitivity(table: Sensitivity, out: Path) -> None:
    """Print what was measured of each kind of weight and each range of layers."""
    tokens, units = table.values["text"]["tokens"], table.values["units"]
    print(f"{out}: {len(units)} tensors or fused groups, {tokens} tokens")
    print(f"{'rounded together':<36}{'to':<18}{'mean KL':>10}")
    for probe in table.values["probes"]:
        forms = sorted(set(probe["forms"].values()))
        print(f"{probe['weights']:<36}{', '.join(forms):<18}{probe['kl']:>10.3g}")


def print_bench(bench: Bench) -> None:
    """Print a line for each step: its time, its floor, and the floor as a part of the time."""
    versions = ", ".join(f"{name} {number}" for name, number in bench.versions.items())
    print(f"{bench.artifact} on {bench.device} ({versions})")
    peer = f"{bench.peer:>14}" if bench.peer else ""
    print(
        f"{'step':<9}{'batch':>6}{'tokens':>8}{'ms':>10}{'eager':>10}{'tokens/s':>11}"
        f"{'floor ms':>10}{'of floor':>10}{'memory':>11}{peer}"
    )
    for p in bench.points:
        memory = size_text(p.peak_memory) if p.peak_memory else "-"
        print(
            f"{p.what:<9}{p.batch:>6}{p.tokens:>8}{p.ms:>10.3f}{_or_dash(p.eager_ms, 10, '.3f')}"
            f"{p.tokens_per_s:>11.0f}{_or_dash(p.floor_ms, 10, '.3f')}"
            f"{_or_dash(p.fraction_of_floor, 10, '.0%')}{memory:>11}"
            f"{_or_dash(p.peer_ms, 14, '.3f') if bench.peer else ''}"
        )


def _or_dash(value: float | None, width: int, form: str) -> str:
    return f"{'-' if value is None else format(value, form):>{width}}"


def print_start(inspection: Inspection, engine: str) -> None:
    """Print how one engine is started on a checkpoint."""
    for line in start_lines(inspection.serving, engine):
        print(line)


def print_inspection(inspection: Inspection, *, tensors: bool) -> None:
    """Print what a checkpoint holds."""
    for line in lines(inspection):
        print(line)
    for note in inspection.notes:
        print(f"note        {note}")
    for problems in by_cause(Problem(**fields) for fields in inspection.problems):
        print(f"PROBLEM     {tell(problems)}")
    if tensors:
        for info in inspection.tensor_list:
            print(f"{info.dtype:<9}{list(info.shape)!s:<24}{info.name}")
