"""Where a command writes: nothing of the user's is replaced, and what cannot be is said at once."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from qwen35_convert.durable import check_place, save_file
from qwen35_convert.errors import OutputError
from qwen35_convert.junit import Case, Results
from qwen35_convert.write.out import check_name
from tests.qwen35_convert.command import called

# Each with the file that it writes at the end.
REPORTS = {
    "page of verify": ["verify", "nano", "--against", "nano", "--level", "structure", "--html"],
    "page of compare": ["compare", "nano", "--recipe", "fp8-block", "--html"],
    "table of compare": ["compare", "nano", "--recipe", "fp8-block", "--csv"],
    "test cases": ["verify", "nano", "--level", "structure", "--junit"],
    "test cases of a recipe": ["recipes", "--check", "fp8-block", "--junit"],
    "test cases of a conversion": ["convert", "nano", "-o", "new", "-q", "--junit"],
    "test cases of a refusal": ["convert", "nowhere", "-o", "new", "--junit"],
    "recipe that fits": ["convert", "nano", "-o", "new.gguf", "--fit", "1GB", "--save-recipe"],
    "sensitivity": ["sensitivity", "nano", "--overwrite", "-o"],
    "imatrix": ["imatrix", "nano", "--overwrite", "-o"],
    "roofline": ["bench", "nano", "--device", "cpu", "--plot"],
}


@pytest.fixture
def here(tmp_path, monkeypatch, nano_path):
    """A folder with the bundled model, in which commands run."""
    shutil.copytree(nano_path, tmp_path / "nano")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["nano/config.json", "mine.svg"])
@pytest.mark.parametrize("report", REPORTS)
def test_a_report_replaces_nothing_else(here, report, name):
    (here / "mine.svg").write_text("a picture of mine")
    before = contents(here)
    done = called(*REPORTS[report], name)
    assert done.returncode in (2, 3, 4), done.stderr
    assert name in done.stderr
    assert contents(here) == before


@pytest.mark.parametrize("report", [name for name in REPORTS if "recipe that" not in name])
def test_a_report_that_could_not_be_written_is_refused_first(here, report):
    (here / "taken").mkdir()
    done = called(*REPORTS[report], "taken")
    assert done.returncode in (2, 3, 4), done.stderr
    assert "taken" in done.stderr
    assert not (here / "new").exists()


def test_a_report_replaces_its_like(here):
    words = ["verify", "nano", "--against", "nano", "--level", "structure"]
    for _ in range(2):
        done = called(*words, "--html", "new/page.html", "--junit", "new/cases.xml")
        assert done.returncode == 0, done.stderr
    (here / "empty.xml").touch()
    assert called(*words, "--junit", "empty.xml").returncode == 0


def test_a_place_is_looked_at_and_made_when_it_is_written(tmp_path):
    place = tmp_path / "new" / "page.html"
    check_place(place, b"<")
    assert not place.parent.exists()
    save_file(place, b"<p>")
    check_place(place, b"<")
    with pytest.raises(OutputError, match="holds something else"):
        check_place(place, (b"{", b"["))
    with pytest.raises(OutputError, match="is a folder"):
        check_place(place.parent, b"<")
    with pytest.raises(OutputError, match="no folder to write in"):
        check_place(place / "below", b"<")


LINKS = ("folder", "file.gguf", "dangling", "dangling.gguf", "loop", "loop.gguf")


@pytest.mark.parametrize("name", LINKS)
def test_an_out_that_is_a_link_is_refused(here, name):
    """It would be replaced itself, and what it leads to would stay."""
    link = here / f"link-{name}"
    shutil.copytree(here / "nano", here / "folder")
    (here / "file.gguf").write_bytes(b"GGUF")
    link.symlink_to(link if name.startswith("loop") else here / name)
    before = {*here.iterdir()}
    done = called("convert", "nano", "-o", link, "--overwrite", "-q")
    assert done.returncode == 4, done.stderr
    assert str(link) in done.stderr
    assert {*here.iterdir()} == before
    assert link.is_symlink()


@pytest.mark.parametrize("name", ["x" * 300, f"{'x' * 300}.gguf", f"{'x' * 240}.gguf", "y/" * 3000])
def test_an_out_that_no_system_names_is_refused(here, name):
    done = called("convert", "nano", "-o", name, "-q")
    assert done.returncode == 4, done.stderr
    assert "cannot be written" in done.stderr
    assert [path.name for path in here.iterdir()] == ["nano"]


@pytest.mark.parametrize("out", [".", "/", "./"])
def test_an_out_without_a_name_of_its_own_is_refused(out):
    with pytest.raises(OutputError, match=r"^[./] has no name of its own, expected the name of"):
        check_name(Path(out))


@pytest.mark.parametrize("name", ["x" * 300, f"{'x' * 300}.gguf", f"{'x' * 300}.safetensors"])
def test_a_source_that_no_system_names_is_refused(here, name):
    for words in (["inspect", name], ["verify", "nano", "--against", name]):
        assert called(*words).returncode == 3


def test_a_file_of_another_case_is_no_folder(here):
    done = called("convert", "nano", "-o", "M.GGUF", "-q")
    assert done.returncode == 4
    assert "ends in .gguf" in done.stderr
    assert not (here / "M.GGUF").exists()


def test_a_model_and_an_imatrix_do_not_replace_each_other(here):
    from formats.gguf.file import build_header
    from formats.gguf.header import Kv

    for name, kind in (("m.gguf", "model"), ("i.gguf", "imatrix")):
        (here / name).write_bytes(build_header([Kv("general.type", "string", kind)], [])[0])
    before = contents(here)
    for words, said in (
        (["imatrix", "nano", "-o", "m.gguf", "--chunks", "1"], "m.gguf is a model"),
        (["convert", "nano", "-o", "i.gguf"], "i.gguf is an importance matrix"),
    ):
        done = called(*words, "--overwrite", "-q")
        assert done.returncode == 4
        assert said in done.stderr
    assert contents(here) == before


def test_an_empty_template_is_refused(here):
    (here / "empty.jinja").write_text(" \n")
    done = called("convert", "nano", "-o", "out", "--chat-template", "empty.jinja", "-q")
    assert done.returncode == 2
    assert "empty.jinja is empty" in done.stderr


def test_test_cases_stay_as_they_were_where_the_new_ones_cannot_be_written(tmp_path, monkeypatch):
    path, results = tmp_path / "cases.xml", Results("verify", "x")
    results.write(path)
    before = path.read_bytes()

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("qwen35_convert.durable.os.pwrite", full)
    results.cases.append(Case("structure", "names"))
    with pytest.raises(OutputError, match="No space left on device"):
        results.write(path)
    assert contents(tmp_path) == {path: before}


@pytest.mark.parametrize("out", ["out", "out.gguf", "a/b/out"])
def test_a_disk_that_is_too_small_leaves_nothing(here, monkeypatch, out):
    usage = shutil.disk_usage(here)._replace(free=1000)
    monkeypatch.setattr("qwen35_convert.write.sink.shutil.disk_usage", lambda _: usage)
    before = sorted(here.rglob("*"))
    done = called("convert", "nano", "-o", out, "-q")
    assert done.returncode == 4
    assert "has 1,000 bytes free on its disk" in done.stderr
    assert "nothing was written" in done.stderr
    assert sorted(here.rglob("*")) == before
