"""The pages of docs/: those that follow from the code, links, and the recipes of examples."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from qwen35_convert.recipe.files import bundled_recipes
from qwen35_convert.recipe.recipe import read_recipe
from tests.generated import DOCS, PAGES

ROOT = DOCS.parent
WRITTEN = sorted([*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name):
    assert (DOCS / name).read_text() == PAGES[name](), "run python -m tests.generated"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    lost = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not lost


def test_every_page_is_linked_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    assert not [page.name for page in DOCS.glob("*.md") if f"docs/{page.name}" not in readme]
    assert len(readme.splitlines()) < 150


def test_every_recipe_is_described():
    text = (DOCS / "recipes.md").read_text()
    assert not [name for name in bundled_recipes() if f"`{name}`" not in text]


def test_the_recipes_of_the_page_on_recipes_are_right(tmp_path):
    text = (DOCS / "recipes.md").read_text()
    blocks = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for i, block in enumerate(blocks):
        file = tmp_path / f"{i}.yaml"
        file.write_text(block)
        assert read_recipe(file).name == str(i)


def test_the_page_on_proof_counts_what_is_planted():
    """`python -m tests.planted` prints its table."""
    from tests.planted.right import artifacts
    from tests.planted.table import cases

    planted = list(cases())
    faults = len({(case.fault.kind, case.fault.name) for case in planted})
    bases = len({case.base for case in planted})
    text = (DOCS / "proof.md").read_text()
    assert f"plant {faults:,} faults in {bases} artifacts" in text
    assert f"**{len(planted):,} of {len(planted):,}**" in text
    assert f"None of {len(artifacts()):,} correct artifacts is refused" in text
    kinds = Counter(case.fault.kind for case in planted)
    bits = ("four bits: codes", "four bits: parts", "four bits: blocks")  # one row
    counts = [sum(kinds.pop(kind) for kind in bits), *kinds.values()]
    rows = re.findall(r"\| ([\d,]+) of \1 \|$", text, re.MULTILINE)
    assert sorted(rows) == sorted(f"{count:,}" for count in counts)
