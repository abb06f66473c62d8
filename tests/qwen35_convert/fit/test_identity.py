"""Whether a table of costs is of a source, where files are alike."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from qwen35_convert.errors import RecipeError
from qwen35_convert.fit.identity import check_source
from qwen35_convert.fit.sensitivity import Sensitivity
from qwen35_convert.options import RunOptions
from qwen35_convert.write.digests import sha256_file
from qwen35_convert.write.receipt import Origin

CONTENTS = {"a.safetensors": b"same", "b.safetensors": b"same", "c.safetensors": b"else"}


@pytest.fixture
def source(tmp_path):
    for name, content in CONTENTS.items():
        (tmp_path / name).write_bytes(content)
    files = {name: SimpleNamespace(path=tmp_path / name) for name in CONTENTS}
    return SimpleNamespace(files=files, overlaid=(), name_of=lambda path: path.name)


def table_of(source, *names: str) -> Sensitivity:
    """Return a table of files with the contents of these, under names of their own."""
    paths = [source.files[name].path for name in names]
    files = {
        f"{i}.safetensors": {"size": path.stat().st_size, "sha256": sha256_file(path)}
        for i, path in enumerate(paths)
    }
    return Sensitivity({"source": {"repo": None, "files": files}})


def test_names_and_their_order_do_not_count(source):
    check_source(table_of(source, *reversed(CONTENTS)), source, Origin(), RunOptions(workers=1))


def test_a_file_has_to_be_there_as_often_as_the_table_has_it(source):
    table = table_of(source, "a.safetensors", "c.safetensors", "c.safetensors")
    with pytest.raises(RecipeError, match=r"other values in a\.safetensors"):
        check_source(table, source, Origin(), RunOptions(workers=1))
