"""A model in several GGUF files is opened from any of them, if they agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from formats.errors import FormatError
from formats.gguf.header import Kv
from formats.gguf.split import files_of, open_files, split_name, split_pairs
from formats.tensor import TensorInfo
from tests.formats.gguf.by_hand import (
    write,
)


def write_split(folder: Path, count: int = 3, **said: Any) -> list[Path]:
    """Write a model of one tensor per file; `said` replaces what file 2 says of the split."""
    paths = []
    for index in range(1, count + 1):
        path = folder / split_name("m", index, count)
        kvs = [Kv("general.name", "string", "m")] if index == 1 else []
        own = [
            Kv(kv.key, kv.kind, said.get(kv.key, kv.value)) if index == 2 else kv
            for kv in split_pairs(index, count, count)
        ]
        name = said.get("name", f"w{index}") if index == 2 else f"w{index}"
        write(
            path, kvs + [kv for kv in own if kv.value is not None], [TensorInfo(name, "F32", (2,))]
        )
        paths.append(path)
    return paths


def test_a_split_model_is_found_from_any_of_its_files(tmp_path):
    paths = write_split(tmp_path)
    for path in paths:
        assert files_of(path) == paths
    files = open_files(paths[2])
    assert [list(file.infos) for file in files] == [["w1"], ["w2"], ["w3"]]
    assert files[0].kv["general.name"].value == "m"
    assert files_of(tmp_path / "m.gguf") == [tmp_path / "m.gguf"]


def test_what_ggmls_package_splits_is_opened(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen35", split_max_tensors=2)
    for i in range(5):
        writer.add_tensor(f"w{i}", np.full((2, 3), i, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    files = open_files(tmp_path / "m-00002-of-00003.gguf")
    assert [len(file.infos) for file in files] == [2, 2, 1]
    assert files[2].read("w4").tolist() == [[4] * 3] * 2


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"split.no": 2}, "m-00002-of-00003.gguf: split.no is 2, expected 1"),
        ({"split.count": 4}, "split.count is 4, expected 3"),
        ({"split.tensors.count": 9}, "split.tensors.count is 9, expected 3"),
        ({"split.no": None}, "split.no is missing, expected 1"),
        ({"name": "w1"}, "m-00002-of-00003.gguf: w1 is in m-00001-of-00003.gguf too"),
    ],
)
def test_files_that_disagree_about_the_split_are_refused(tmp_path, said, reason):
    paths = write_split(tmp_path, **said)
    with pytest.raises(FormatError, match=reason):
        open_files(paths[0])


def test_a_missing_or_renamed_file_of_a_split_is_refused(tmp_path):
    paths = write_split(tmp_path)
    paths[1].rename(tmp_path / "alone.gguf")
    with pytest.raises(FormatError, match=r"m-00002-of-00003.gguf is missing .1 of 3"):
        files_of(paths[0])
    with pytest.raises(FormatError, match=r"alone.gguf: split.no is 1, expected 0"):
        open_files(tmp_path / "alone.gguf")
    for index in (0, 4):
        with pytest.raises(FormatError, match=f"is file {index} of 3"):
            files_of(tmp_path / f"m-0000{index}-of-00003.gguf")


def test_a_single_file_may_be_named_as_one_of_one(tmp_path):
    path = tmp_path / split_name("m", 1, 1)
    write(path, [], [TensorInfo("w", "F32", (2,))])
    assert len(open_files(path)) == 1
