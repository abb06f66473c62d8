"""How the files begin that are written beside artifacts: no other file is replaced."""

from __future__ import annotations

PAGE = "<!doctype html>"
FIGURES = "name,recipe,"  # the columns of a comparison
COSTS = '{\n "schema": "qwen35-sensitivity"'
CHOSEN = "# Chosen by qwen35: "
TEST_CASES = "<?xml"
