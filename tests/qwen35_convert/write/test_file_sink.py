"""GGUF output: nothing of the user's is lost, and a crash between two moves is finished."""

from __future__ import annotations

import json
import shutil

import pytest

from formats.tensor import TensorInfo
from qwen35_convert.errors import OutputError
from qwen35_convert.planning.plan import Shard
from qwen35_convert.write.file_sink import FileSink, check_out_files, finish_moves
from qwen35_convert.write.out import partial_of
from qwen35_convert.write.sink import FolderSink


def shards(*names):
    info = TensorInfo("t", "U8", (4,))
    return [
        Shard(name, (info,), b"GGUF" + bytes([i]) * 4, (8,), 12) for i, name in enumerate(names)
    ]


def write(out, *names):
    sink = FileSink(out, shards(*names))
    sink.open()
    sink.create()
    sink.write("t", 0, memoryview(b"abcd"))
    sink.add_file(sink.receipt, b"{}")
    return sink


def test_all_files_appear_together_and_the_folder_is_gone(tmp_path):
    out = tmp_path / "m.gguf"
    sink = write(out, "m.gguf", "mmproj-m.gguf")
    assert not out.exists()
    sink.commit()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["m.gguf", "m.gguf.receipt.json", "mmproj-m.gguf"]
    assert out.read_bytes() == b"GGUF\0\0\0\0" + bytes(4)
    assert (tmp_path / "mmproj-m.gguf").read_bytes().endswith(b"abcd")


def test_a_crash_between_two_moves_is_finished_by_the_next_run(tmp_path):
    out = tmp_path / "m.gguf"
    sink = write(out, "m.gguf", "mmproj-m.gguf")
    names = sorted(sink.artifact_files())
    (sink.work / "moves").write_text(json.dumps(names))
    (sink.work / "mmproj-m.gguf").rename(tmp_path / "mmproj-m.gguf")
    sink.close()
    finish_moves(out, out, "")
    assert out.is_file()
    assert not partial_of(out).exists()
    finish_moves(out, out, "")


def test_what_stands_there_is_kept_without_overwrite(tmp_path):
    out = tmp_path / "m.gguf"
    out.write_bytes(b"GGUF old")
    with pytest.raises(OutputError, match="exists"):
        check_out_files(out, ["m.gguf"], [], overwrite=False)
    check_out_files(out, ["m.gguf"], [], overwrite=True)
    out.write_bytes(b"a letter")
    with pytest.raises(OutputError, match="is not a GGUF file"):
        check_out_files(out, ["m.gguf"], [], overwrite=True)
    assert out.read_bytes() == b"a letter"


def test_no_file_of_the_set_and_none_of_the_source_is_overwritten(tmp_path):
    out, beside = tmp_path / "m.gguf", tmp_path / "mmproj-m.gguf"
    beside.write_bytes(b"GGUF old")
    with pytest.raises(OutputError, match=r"mmproj-m\.gguf exists"):
        check_out_files(out, ["m.gguf", "mmproj-m.gguf"], [], overwrite=False)
    with pytest.raises(OutputError, match="file of the source"):
        check_out_files(out, ["m.gguf", "mmproj-m.gguf"], [beside], overwrite=True)
    link = tmp_path / "link.gguf"
    link.symlink_to(beside)
    with pytest.raises(OutputError, match="file of the source"):
        check_out_files(link, [], [beside], overwrite=True)


@pytest.mark.parametrize("name", ["letter/in/m.gguf", "folder.gguf"])
def test_an_out_that_cannot_be_is_refused(tmp_path, name):
    (tmp_path / "letter").write_bytes(b"mine")
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(OutputError):
        check_out_files(tmp_path / name, [], [], overwrite=True)


def fill_disk(monkeypatch, free: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr("qwen35_convert.write.sink.shutil.disk_usage", lambda _: usage)


@pytest.mark.parametrize("kind", [FileSink, FolderSink])
def test_a_disk_that_is_too_small_stays_as_it_was(tmp_path, monkeypatch, kind):
    fill_disk(monkeypatch, 11)
    sink = kind(tmp_path / "new" / "m.gguf", shards("m.gguf"))
    sink.open()
    with pytest.raises(OutputError, match="has 11 bytes free on its disk, expected 12") as caught:
        sink.create()
    assert caught.value.left == "nothing was written"
    assert not list(tmp_path.iterdir())


def test_what_was_written_before_the_disk_filled_up_is_kept(tmp_path, monkeypatch):
    write(tmp_path / "m.gguf", "m.gguf").close()
    fill_disk(monkeypatch, -(10**6))
    sink = FileSink(tmp_path / "m.gguf", shards("m.gguf"))
    sink.open()
    with pytest.raises(OutputError, match="another disk") as caught:
        sink.create()
    sink.close()
    assert caught.value.left == sink.left
    assert (sink.work / "m.gguf").is_file()
