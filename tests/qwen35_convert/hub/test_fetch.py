"""Fetching, against a real HTTP server on the loopback interface that misbehaves on demand."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import validate_repo_id
from hypothesis import given
from hypothesis import strategies as st

from qwen35_convert.errors import FetchError, SaveError
from qwen35_convert.hub.client import parse_repo
from qwen35_convert.hub.fetch import fetch
from tests.qwen35_convert.hub.hub_server import SETTINGS, Fault, Hub, checkpoint, git_id, only_hub

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = "maker/tiny-qwen"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"
NEEDED = {"LICENSE", "README.md", "config.json", "tokenizer.json", INDEX, *SHARDS}
TOKEN = "hf_" + "s3cr3t" * 5
ROOT = Path(__file__).parents[3]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with only_hub(tmp_path, monkeypatch) as hub:
        yield hub


@pytest.fixture
def sha(hub: Hub) -> str:
    return hub.repo(REPO).commit(checkpoint())


@pytest.fixture
def naps() -> list[float]:
    return []


@pytest.fixture
def logged() -> Iterator[StringIO]:
    """What is logged during a test."""
    handler = logging.StreamHandler(StringIO())
    logging.getLogger().addHandler(handler)
    yield handler.stream
    logging.getLogger().removeHandler(handler)


@pytest.fixture(params=["cache", "folder"])
def to(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "out" if request.param == "folder" else None


def same_as(path: Path, files: dict[str, bytes]) -> bool:
    return all((path / name).read_bytes() == files[name] for name in NEEDED)


def test_only_what_a_conversion_needs_comes_at_one_commit(hub: Hub, sha: str, to: Path | None):
    got = fetch(REPO, to=to, progress=False)
    files = checkpoint()
    assert (got.repo, got.revision) == (REPO, sha)
    assert same_as(got.path, files)
    assert got.files == {n: (len(files[n]), hashlib.sha256(files[n]).hexdigest()) for n in NEEDED}
    assert set(hub.got()) == NEEDED
    assert all(f"/{sha}/" in s.path for s in hub.seen if not s.path.startswith("/api/"))
    assert len([s for s in hub.seen if s.path.startswith("/api/")]) == 1


NESTED = {"additional_chat_templates/tool_use.jinja": b"{{ tools }}", "modules.json": b"[]",
          "1_Pooling/config.json": b"{}"}  # fmt: skip
OTHERS = {"additional_chat_templates/deep/x.jinja": b"", "additional_chat_templates/x.py": b"",
          "onnx/config.json": b"{}", "2_Dense/model.safetensors": b"0"}  # fmt: skip


def test_side_files_come_in_folders_of_their_own(hub: Hub, to: Path | None):
    commit = hub.repo(REPO).commit(checkpoint() | NESTED | OTHERS)
    got = fetch(REPO, to=to, progress=False)
    assert set(got.files) == NEEDED | set(NESTED)
    for name, content in NESTED.items():
        assert (got.path / name).read_bytes() == content
    hub.seen.clear()
    assert fetch(REPO, commit, to=to, progress=False).files == got.files
    assert not hub.got()


def test_the_folder_holds_plain_files_and_the_cache_is_the_hubs_own(hub: Hub, sha: str, tmp_path):
    folder = fetch(REPO, to=tmp_path / "out", progress=False).path
    assert not any(p.is_symlink() for p in folder.iterdir())
    cached = fetch(REPO, progress=False).path
    assert cached.parts[-4:] == ("hub", "models--maker--tiny-qwen", "snapshots", sha)
    local = huggingface_hub.try_to_load_from_cache(REPO, SHARDS[0], cached.parents[2], "main")
    assert local == str(cached / SHARDS[0])


def test_a_second_run_downloads_nothing(hub: Hub, sha: str, to: Path | None):
    first = fetch(REPO, to=to, progress=False)
    hub.seen.clear()
    assert fetch(REPO, to=to, progress=False) == first
    assert hub.got() == []


def test_a_real_repository_with_one_shard_comes_whole(hub: Hub):
    data = ROOT / "tests/data/nano-dense"
    files = {p.name: p.read_bytes() for p in data.iterdir() if p.is_file()}
    hub.repo("nano/dense").commit(files)
    got = fetch("nano/dense", progress=False)
    assert {n: (got.path / n).read_bytes() for n in got.files} == files


def test_a_single_file_needs_no_index(hub: Hub):
    files = {"model.safetensors": checkpoint()[SHARDS[0]], "config.json": b"{}", "other.txt": b""}
    hub.repo(REPO).commit(files)
    assert set(fetch(REPO, progress=False).files) == {"model.safetensors", "config.json"}


def test_the_stand_in_also_serves_the_librarys_own_download(hub: Hub, sha: str, tmp_path: Path):
    path = huggingface_hub.snapshot_download(
        REPO, endpoint=hub.url, cache_dir=tmp_path / "c", tqdm_class=None
    )
    files = checkpoint()
    assert {n: (Path(path) / n).read_bytes() for n in files} == files


def test_a_cut_connection_goes_on_where_it_stopped(hub: Hub, sha: str, to, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)  # what is not a whole chunk is lost
    hub.fail("GET", SHARDS[0], Fault(cut=1001))
    assert same_as(fetch(REPO, to=to, progress=False).path, checkpoint())
    asked = [s for s in hub.seen if s.path.endswith(SHARDS[0]) and s.server == "cdn"]
    assert [s.range for s in asked] == ["", "bytes=1000-"]


def test_a_reset_connection_is_tried_again(hub: Hub, sha: str, naps, logged):
    hub.fail("GET", SHARDS[1], Fault(cut=1001, reset=True))
    assert same_as(fetch(REPO, progress=False, sleep=naps.append).path, checkpoint())
    assert naps == [1.0]
    assert f"{REPO}: {SHARDS[1]}" in logged.getvalue()


@pytest.mark.parametrize(
    ("what", "name"), [("api", REPO), ("HEAD", SHARDS[0]), ("HEAD", INDEX), ("GET", SHARDS[0])]
)
@pytest.mark.parametrize("fault", [Fault(503), Fault(429, retry_after="7"), Fault(502)])
def test_a_busy_server_is_waited_for(hub: Hub, sha: str, naps, what, name, fault):
    hub.fail(what, name, fault, fault)
    assert same_as(fetch(REPO, progress=False, sleep=naps.append).path, checkpoint())
    if what == "api":
        assert naps == ([7.0, 7.0] if fault.retry_after else [1.0, 2.0])


def test_a_signed_address_that_expired_is_asked_for_again(hub: Hub, sha: str, naps):
    hub.fail("GET", SHARDS[0], Fault(403))
    assert same_as(fetch(REPO, progress=False, sleep=naps.append).path, checkpoint())
    assert naps == [1.0]
    assert hub.got("HEAD").count(SHARDS[0]) == 2


def test_a_server_that_stays_busy_is_given_up(hub: Hub, sha: str, naps):
    hub.fail("GET", SHARDS[0], *[Fault(503)] * 5)
    with pytest.raises(FetchError, match="HTTP 503") as caught:
        fetch(REPO, progress=False, sleep=naps.append)
    assert naps == [1.0, 2.0, 4.0, 8.0]
    assert SHARDS[0] in str(caught.value)
    assert "secret" not in str(caught.value), "the CDN's signature is no one's business"


def test_a_hub_that_names_no_file_is_waited_for_and_given_up(hub: Hub, sha: str, naps):
    hub.fail("HEAD", SHARDS[0], *[Fault(503)] * 7)  # the library's own tries
    fetch(REPO, progress=False, sleep=naps.append)
    assert naps == [1.0]
    hub.repos[REPO].commit(checkpoint(1))
    hub.fail("HEAD", SHARDS[0], *[Fault(503)] * 35)
    with pytest.raises(FetchError, match="HTTP 503"):
        fetch(REPO, progress=False, sleep=naps.append)


def test_what_a_signed_address_or_a_token_would_give_away_is_cut(hub: Hub, sha: str, monkeypatch):
    def fail(*names: str, **options: object) -> str:
        raise RuntimeError(f"no block of https://cas/x?Signature=secret for {TOKEN}\n{TOKEN}")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(FetchError, match="no block of https://cas/x") as caught:
        fetch(REPO, progress=False, sleep=lambda seconds: None)
    assert "secret" not in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_a_server_may_not_ask_for_an_hour(hub: Hub, sha: str, naps):
    hub.fail("api", REPO, Fault(429, retry_after="3600"))
    fetch(REPO, progress=False, sleep=naps.append)
    assert naps == [300.0]


@pytest.mark.parametrize("name", [SHARDS[1], "config.json", INDEX])
def test_wrong_bytes_are_refused_named_and_removed(hub: Hub, sha: str, to, name, tmp_path):
    right = checkpoint()[name]
    wrong = bytes([right[0] ^ 1]) + right[1:]
    hub.fail("GET", name, Fault(body=wrong))
    with pytest.raises(FetchError) as caught:
        fetch(REPO, to=to, progress=False)
    message = str(caught.value)
    assert message.startswith(name)
    left = [p for p in tmp_path.rglob("*") if p.name == name]
    assert left == [], "neither the download nor a link to it"
    for data in (wrong, right):
        sha256 = hashlib.sha256(data).hexdigest()
        assert (sha256 if name == SHARDS[1] else git_id(data)) in message
    assert same_as(fetch(REPO, to=to, progress=False).path, checkpoint())


@pytest.mark.parametrize("size", [0, 100, 9000])
def test_a_wrong_length_is_refused(hub: Hub, sha: str, naps, size):
    right = checkpoint()[SHARDS[0]]
    hub.fail("GET", SHARDS[0], *[Fault(body=(right + right)[:size])] * 5)
    with pytest.raises(FetchError, match=f"size {len(right)} but has size {size}") as caught:
        fetch(REPO, progress=False, sleep=naps.append)
    assert SHARDS[0] in str(caught.value)
    assert same_as(fetch(REPO, progress=False).path, checkpoint())


@pytest.mark.parametrize(("lost", "said"), [(0, "got +sha256 "), (9, "got +[0-9]+ bytes")])
def test_a_corrupt_file_of_an_earlier_run_is_named_and_kept(hub: Hub, sha: str, to, lost, said):
    path = fetch(REPO, to=to, progress=False).path / SHARDS[0]
    blob, stat = path.resolve(), path.stat()
    blob.write_bytes(bytes(stat.st_size - lost))
    os.utime(blob, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(FetchError, match=f"{said}(.|\n)*there before this run") as caught:
        fetch(REPO, to=to, progress=False)
    assert str(blob) in str(caught.value)
    assert blob.read_bytes() == bytes(stat.st_size - lost)


def test_a_gated_repository_says_where_to_ask(hub: Hub):
    hub.repo(REPO, gated=True).commit(checkpoint())
    with pytest.raises(FetchError, match="gated") as caught:
        fetch(REPO, progress=False)
    assert f"accept the terms at {hub.url}/{REPO}" in str(caught.value)
    assert "HTTP 401, with no token" in str(caught.value)


def test_a_token_opens_a_gated_repository_and_never_reaches_the_cdn(hub: Hub, monkeypatch):
    hub.repo(REPO, gated=True).commit(checkpoint())
    hub.tokens.add(TOKEN)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert same_as(fetch(REPO, progress=False).path, checkpoint())
    assert {s.authorization for s in hub.seen if s.server == "hub"} == {f"Bearer {TOKEN}"}
    assert {s.authorization for s in hub.seen if s.server == "cdn"} == {""}


def test_a_refused_token_is_not_shown(hub: Hub, sha: str, monkeypatch, logged):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(FetchError, match="renew HF_TOKEN") as caught:
        fetch(REPO, progress=False)
    assert "HTTP 401, with a token" in str(caught.value)
    assert TOKEN not in str(caught.value) + logged.getvalue()


@pytest.mark.parametrize("flags", [{}, {"private": True}])
def test_a_missing_or_private_repository_is_named(hub: Hub, flags):
    hub.repo("maker/other" if not flags else REPO, **flags).commit(checkpoint())
    with pytest.raises(FetchError, match=f"{REPO} is not at {hub.url}"):
        fetch(REPO, progress=False)


def test_a_repository_that_may_be_a_misspelt_path_is_answered_with_the_path(
    hub, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "makers" / "tiny-qwen").mkdir(parents=True)
    hub.repo("maker/other").commit(checkpoint())
    with pytest.raises(FetchError, match="; a path that exists is makers/tiny-qwen"):
        fetch(REPO, progress=False)


def test_a_missing_revision_is_named(hub: Hub, sha: str):
    with pytest.raises(FetchError, match=f"{REPO} has no v9"):
        fetch(REPO, "v9", progress=False)


def test_a_branch_a_pull_request_and_a_commit_are_revisions(hub: Hub, sha: str):
    pull = hub.repos[REPO].commit(checkpoint(1), branch="refs/pr/1")
    assert fetch(REPO, "refs/pr/1", progress=False).revision == pull
    assert fetch(REPO, sha, progress=False).revision == sha
    assert fetch(REPO, "main", progress=False).revision == sha


def test_a_branch_that_moves_meanwhile_mixes_nothing(hub: Hub, sha: str):
    def move(seen):
        if seen.path.endswith("config.json") and hub.repos[REPO].branches["main"] == sha:
            hub.repos[REPO].commit(checkpoint(1))

    hub.after = move
    got = fetch(REPO, progress=False)
    assert got.revision == sha
    assert same_as(got.path, checkpoint())
    later = fetch(REPO, progress=False)
    assert later.revision != sha
    assert same_as(later.path, checkpoint(1))


def test_a_folder_follows_its_branch(hub: Hub, sha: str, tmp_path: Path):
    fetch(REPO, to=tmp_path / "out", progress=False)
    hub.repos[REPO].commit(checkpoint(1))
    assert same_as(fetch(REPO, to=tmp_path / "out", progress=False).path, checkpoint(1))


@pytest.mark.parametrize("edited", [False, True])
def test_a_users_own_file_is_not_replaced(hub: Hub, sha: str, tmp_path: Path, edited):
    own = tmp_path / "out" / "config.json"
    if edited:
        fetch(REPO, to=own.parent, progress=False)
    own.parent.mkdir(exist_ok=True)
    own.write_bytes(b"{my own}")
    os.utime(own, (2**31, 2**31))
    with pytest.raises(FetchError, match="not an unmodified download") as caught:
        fetch(REPO, to=own.parent, progress=False)
    assert caught.value.left == "no file there was changed"
    assert own.read_bytes() == b"{my own}"


@pytest.mark.parametrize("own", [INDEX, "config.json", SHARDS[0]])
def test_a_folder_with_a_model_of_the_user_s_keeps_every_file(hub: Hub, sha: str, tmp_path, own):
    """The index is fetched first of all: it must not replace another model's."""
    folder = tmp_path / "out"
    folder.mkdir()
    before = {INDEX: b"{my index}", own: b"{my own}"}
    for name, content in before.items():
        (folder / name).write_bytes(content)
    with pytest.raises(FetchError, match="not an unmodified download"):
        fetch(REPO, to=folder, progress=False)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not hub.got()


def test_a_copied_folder_is_taken_as_it_is(hub: Hub, sha: str, tmp_path: Path):
    (tmp_path / "out").mkdir()
    files = checkpoint()
    for name in SHARDS:
        (tmp_path / "out" / name).write_bytes(files[name])
    fetch(REPO, to=tmp_path / "out", progress=False)
    assert not set(SHARDS) & set(hub.got())


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["pytorch_model.bin"], "got +pytorch_model.bin(.|\n)*save_file"),
        (["a-q4.gguf", "b-q8.gguf"], "got +a-q4.gguf, b-q8.gguf(.|\n)*hf download"),
        (["consolidated.safetensors"], "got +consolidated.safetensors"),
        ([], "no weights"),
    ],
)
def test_a_repository_without_usable_weights_says_what_it_has(hub: Hub, files, said):
    hub.repo(REPO).commit(dict.fromkeys(files, b"x") | {"config.json": b"{}"})
    with pytest.raises(FetchError, match=said):
        fetch(REPO, progress=False)
    assert hub.got() == []


@pytest.mark.parametrize(
    "name",
    [
        "../evil.safetensors",
        "/etc/evil.safetensors",
        "a/../../evil.safetensors",
        "evil.bin",
        "..\\evil.safetensors",
        "C:evil.safetensors",
        "a//b.safetensors",
        "a\n.safetensors",
        7,
        "",
        ".hidden/x.safetensors",
        "model.safetensors/",
        "x.safetensors.py",
    ],
)
def test_a_hostile_name_in_the_index_is_refused(hub: Hub, tmp_path: Path, name):
    index = json.dumps({"weight_map": {"t": name}}).encode()
    hub.repo(REPO).commit(checkpoint() | {INDEX: index})
    with pytest.raises(FetchError, match="names"):
        fetch(REPO, to=tmp_path / "out", progress=False)
    assert hub.got() == [INDEX]


@pytest.mark.parametrize("index", [b"", b"[]", b"{}", b'{"weight_map": 3}', b"\xff\xfe"])
def test_a_broken_index_is_refused(hub: Hub, index):
    hub.repo(REPO).commit(checkpoint() | {INDEX: index})
    with pytest.raises(FetchError, match=INDEX):
        fetch(REPO, progress=False)


@pytest.mark.parametrize("name", [SHARDS[0], "config.json"])
def test_a_repository_that_lacks_a_file_is_refused_before_the_weights(hub: Hub, name):
    files = checkpoint()
    del files[name]
    hub.repo(REPO).commit(files)
    with pytest.raises(FetchError, match=f"incomplete(.|\n)*no {name}"):
        fetch(REPO, progress=False)
    assert hub.got() == [INDEX]


def test_a_full_disk_is_seen_before_the_download(hub: Hub, sha: str, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 5000})())
    with pytest.raises(SaveError, match=r"too small(.|\n)*5000 bytes") as caught:
        fetch(REPO, progress=False)
    assert caught.value.exit_code == 4
    assert hub.got() == [INDEX]


@pytest.mark.parametrize("to", ["file/folder", None])
def test_a_folder_that_cannot_be_written_is_named(hub: Hub, sha: str, tmp_path, monkeypatch, to):
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    with pytest.raises(SaveError, match="cannot be saved") as caught:
        fetch(REPO, to=to and tmp_path / to, progress=False)
    assert str(tmp_path / "file") in caught.value.got
    assert "choose another folder" in caught.value.fix
    assert caught.value.exit_code == 4
    assert caught.value.left == "nothing was written"


def test_no_connection_is_said_after_the_tries(hub: Hub, naps, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(FetchError, match=r"a hub at http://127.0.0.1:1(.|\n)*HF_HUB_OFFLINE=1"):
        fetch(REPO, progress=False, sleep=naps.append)
    assert len(naps) == 4


def test_a_page_that_is_no_hub_is_said(hub: Hub, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", hub.url + "/cdn")
    with pytest.raises(FetchError, match="HTTP 404"):
        fetch(REPO, progress=False)


def test_nothing_about_this_machine_is_told(hub: Hub, sha: str):
    fetch(REPO, progress=False)
    agents = {s.user_agent for s in hub.seen}
    assert not [a for a in agents if "torch" in a or "agent/" in a]
    assert not [s for s in hub.seen if "harness" in s.path or "telemetry" in s.path]


@pytest.mark.parametrize("progress", [True, False])
def test_progress_is_shown_only_when_asked_for(hub: Hub, sha: str, monkeypatch, capfd, progress):
    monkeypatch.setenv("TQDM_POSITION", "-1")  # draws bars though stderr is no terminal
    fetch(REPO, progress=progress)
    out, error = capfd.readouterr()
    assert out == ""
    assert bool(error) == progress


def offline(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Fetch in a process of its own, offline from its first import on."""
    code = (
        "import sys; from qwen35_convert.errors import FetchError\n"
        "from qwen35_convert.hub.fetch import fetch\n"
        "try: print(fetch(*sys.argv[1:]).path)\n"
        "except FetchError as error: print(error)"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("HF_ENDPOINT", *SETTINGS)}
    env |= {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, REPO, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True)


def test_offline_uses_a_complete_cache_and_nothing_else(hub: Hub, sha: str, tmp_path: Path):
    assert "no main of it" in offline(tmp_path / "home").stdout
    path = fetch(REPO, progress=False).path
    hub.seen.clear()
    assert offline(tmp_path / "home").stdout.strip() == str(path)
    assert offline(tmp_path / "home", sha).stdout.strip() == str(path)
    assert hub.seen == []


def test_offline_is_also_seen_after_the_first_import(hub: Hub, sha: str, monkeypatch, tmp_path):
    online = fetch(REPO, progress=False)
    hub.seen.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert fetch(REPO) == online
    with pytest.raises(FetchError, match="no v2 of it"):
        fetch(REPO, "v2")
    with pytest.raises(FetchError, match="offline"):
        fetch(REPO, to=tmp_path / "out")
    assert hub.seen == []


def test_offline_refuses_an_incomplete_or_corrupt_cache(hub: Hub, sha: str, monkeypatch):
    path = fetch(REPO, progress=False).path / SHARDS[1]
    blob = path.resolve()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    blob.write_bytes(bytes(blob.stat().st_size))
    with pytest.raises(FetchError, match=f"{SHARDS[1]} is not what(.|\n)*sha256"):
        fetch(REPO)
    blob.unlink()
    with pytest.raises(FetchError, match=f"no {SHARDS[1]}"):
        fetch(REPO)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Qwen/Qwen3.5-0.8B", ("Qwen/Qwen3.5-0.8B", None)),
        ("Qwen/Qwen3.5-0.8B@main", ("Qwen/Qwen3.5-0.8B", "main")),
        ("a/b@refs/pr/12", ("a/b", "refs/pr/12")),
        ("a_/_b", ("a_/_b", None)),
        *(
            (bad, None)
            for bad in (
                "",
                "a",
                "a/",
                "/a",
                "a/b/c",
                "./a/b",
                "../a",
                "a/..",
                "a/b@",
                "a/b@../x",
                "a--b/c",
                "a/b.git",
                "a/b@x y",
                "a/-b",
                "a/b.",
                "a/b@-x",
                "a b/c",
                "a/b@x//y",
                "a/b@x/",
                "a/b\n",
                "out/model.safetensors",
                "out/model.gguf",
                "http://a/b",
                "a/" + "b" * 97,
                "ä/b",
            )
        ),
    ],
)
def test_a_repository_is_owner_name_and_revision(source, expected):
    assert parse_repo(source) == expected


def test_a_path_that_exists_is_no_repository(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert parse_repo("a/b") is None
    assert parse_repo("a/c") == ("a/c", None)


@given(st.text("ab./-_@ \\~", max_size=12))
def test_what_is_taken_for_a_repository_is_one_to_the_library(source):
    found = parse_repo(source)
    if found:
        assert "@".join(part for part in found if part) == source
        validate_repo_id(found[0])


@pytest.mark.parametrize(("repo", "revision"), [("a/../b", None), ("a/b", "../../x"), ("a", None)])
def test_a_name_that_is_none_is_refused_before_the_network(hub: Hub, repo, revision):
    with pytest.raises(FetchError, match="not a repository id"):
        fetch(repo, revision)
    assert hub.seen == []
