"""What CONTRIBUTING and README name is there: files, tables, commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("", "qwen35_convert", "benchmarks", "tests")


def paths_of(document: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return sorted(set(re.findall(r"`([\w/]+\.(?:py|md|jsonl|yaml|json))`", text)))


@pytest.mark.parametrize(
    "document", ["CONTRIBUTING.md", "docs/performance.md", "benchmarks/README.md"]
)
def test_every_file_that_is_named_exists(document):
    paths = paths_of(document)
    assert paths, "a document names the files it speaks of"
    lost = [path for path in paths if not any((ROOT / f / path).is_file() for f in FOLDERS)]
    lost = [path for path in lost if not (ROOT / "benchmarks" / "results" / path).is_file()]
    assert set(lost) <= {"utils.py"}  # named because it must not be there


def test_the_words_that_tables_are_called_by_are_in_their_files():
    places = {
        "formats/family/roles.py": "ROLES",
        "quant/registry.py": "SCHEMES",
        "qwen35_convert/containers/registry.py": "CONTAINERS",
        "qwen35_convert/recipe/parts.py": "FORMATS",
        "qwen35_convert/options.py": "EXECUTORS",
        "qwen35_convert/verification/table.py": "CHECKS",
    }
    for path, table in places.items():
        assert re.search(rf"^{table}\b", (ROOT / path).read_text(), re.MULTILINE), path
