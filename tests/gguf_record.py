"""What llama.cpp's own converter made of the bundled model: every key, every tensor's bytes hashed.

    python -m tests.gguf_record TREE [SOURCE ...]

compares our files of the sources with those of the converter in TREE, a source tree of llama.cpp,
and without a source writes tests/golden/llama_cpp.json anew, which `test_gguf_record` reads.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

Record = dict[str, dict[str, Any]]
NANO = Path(__file__).parent / "data" / "nano-dense"
GOLDEN = Path(__file__).parent / "golden" / "llama_cpp.json"
# name of a file: mix, MTP, and whether it is the vision file
CASES = {
    "f32": ("f32", "keep", False), "bf16": ("bf16", "keep", False), "q8_0": ("q8_0", "keep", False),
    "f16": ("f16", "keep", False), "q8_0-nomtp": ("q8_0", "drop", False),
    "mmproj-f32": ("f32", "keep", True), "mmproj-f16": ("f16", "keep", True),
    "mmproj-bf16": ("bf16", "keep", True), "mmproj-q8_0": ("q8_0", "keep", True),
}  # fmt: skip
LONG, FEW = 200, 16
LAST_BIT = 2**-22


def describe(path: Path) -> Record:
    """Return a GGUF file's keys, in order, and its tensors: type, ne, hash of the bytes."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    keys = {
        name: [[kind.name for kind in field.types], _short(field.contents())]
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    tensors = {
        t.name: [t.tensor_type.name, [int(n) for n in t.shape], _content(t.data)]
        for t in reader.tensors
    }
    return {"keys": keys, "tensors": tensors}


def _content(data: Any) -> Any:
    """Return a hash, or the numbers if they are few: exp in A_log may differ in its last bit."""
    return data.tolist() if data.size < FEW else _digest(data.tobytes())


def _short(value: Any) -> Any:
    """Return a value, or the hash of a long one."""
    text = json.dumps(value, default=_plain)
    return json.loads(text) if len(text) < LONG else _digest(text.encode())


def _plain(value: Any) -> Any:
    assert isinstance(value, np.generic), f"{value!r} is no number"
    return value.item()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def differences(ours: Record, theirs: Record) -> list[str]:
    """Return what is missing, more or other in our file."""
    found = []
    for part in theirs:
        for name in sorted(ours[part].keys() | theirs[part].keys()):
            left, right = ours[part].get(name), theirs[part].get(name)
            if not _alike(left, right):
                found.append(f"{name}: ours {left}, llama.cpp's {right}")
    return found


def _alike(left: Any, right: Any) -> bool:
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_alike, left, right))
    if isinstance(left, float) and isinstance(right, float):
        return abs(left - right) <= LAST_BIT * abs(right)
    return bool(left == right)


def convert(source: Path, out: Path, case: str) -> Path:
    """Return our file of a case, written below `out`."""
    from qwen35_convert import api
    from qwen35_convert.recipe.recipe import build_recipe

    mix, mtp, vision = CASES[case]
    recipe = build_recipe(
        {
            "mtp": mtp,
            "vision": "keep" if vision else "drop",
            "quantize": {"scheme": mix, "mix": "llama.cpp"},
            "export": {"format": "gguf"},
        }
    )
    api.convert(source, out / f"{case}.gguf", recipe, options=api.RunOptions(verify=False))
    return out / (f"mmproj-{case}.gguf" if vision else f"{case}.gguf")


def convert_theirs(tree: Path, source: Path, out: Path, case: str) -> Path:
    """Return the file of llama.cpp's converter."""
    from benchmarks.outside import converter

    mix, mtp, vision = CASES[case]
    flags = ["--no-mtp"] * (mtp == "drop") + ["--mmproj"] * vision
    path = out / f"theirs-{case}.gguf"
    subprocess.run(converter(tree, source, path, mix, *flags), check=True, capture_output=True)
    return path


def main(tree: str, *sources: str) -> None:
    """Compare, or record."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        if not sources:
            found = {c: describe(convert_theirs(Path(tree), NANO, out, c)) for c in CASES}
            GOLDEN.write_text(_lines(found))
        for source in map(Path, sources):
            for case in CASES:
                theirs = describe(convert_theirs(Path(tree), source, out, case))
                apart = differences(describe(convert(source, out, case)), theirs)
                print(source.name, case, *(apart or ["the same"]), sep="\n  ")  # noqa: T201
                for path in out.iterdir():
                    path.unlink()


def _lines(found: dict[str, Record]) -> str:
    """Return JSON with one key or tensor a line."""
    parts = []
    for case, record in found.items():
        inner = ",\n".join(
            f"  {json.dumps(part)}: {{\n"
            + ",\n".join(f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in record[part].items())
            + "\n  }"
            for part in record
        )
        parts.append(f" {json.dumps(case)}: {{\n{inner}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    main(*sys.argv[1:])
