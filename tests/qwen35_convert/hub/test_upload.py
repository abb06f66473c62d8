"""An artifact on the hub: exactly what its receipt lists, resumed where a connection was cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

import qwen35_convert as q
from formats.safetensors.file import SafetensorsFile
from qwen35_convert.cli import app
from qwen35_convert.publish import upload_artifact
from tests.checkpoints import hub_config, make_weights, write_checkpoint
from tests.qwen35_convert.hub.hub_server import Fault, Hub, only_hub

# huggingface_hub 2.4 sends files by an argument that its HTTP client has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

REPO, TOKEN = "acme/Borealis-4B-FP8", "hf_abc"
CUT = Fault(cut=1000, reset=True)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with only_hub(tmp_path, monkeypatch) as hub:
        hub.tokens.add(TOKEN)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    """A folder with several shards, an owner's note, and a file that its receipt does not list."""
    folder = tmp_path_factory.mktemp("upload")
    source = write_checkpoint(folder / "in", hub_config(), make_weights(hub_config()))
    overrides = ["export.max_shard_size=1MB"]
    q.convert(source, folder / "out", "fp8-block", overrides=overrides)
    (folder / "out" / "notes.txt").write_text("not for others")
    return folder / "out"


def on_hub(hub: Hub) -> dict[str, bytes]:
    repo = hub.repos[REPO]
    return repo.commits[repo.branches["main"]]


def listed(artifact: Path) -> dict[str, bytes]:
    receipt = json.loads((artifact / "qwen35-receipt.json").read_text())
    names = (*receipt["output"]["files"], "qwen35-receipt.json")
    return {name: (artifact / name).read_bytes() for name in names}


def test_exactly_the_listed_files_are_uploaded_in_one_commit(hub, artifact):
    done = q.upload(artifact, REPO)
    assert on_hub(hub) == listed(artifact)
    assert "notes.txt" not in on_hub(hub)
    assert "README.md" in on_hub(hub)
    assert len(hub.repos[REPO].commits) == 2  # the empty one, and this
    assert done.files == {name: len(data) for name, data in sorted(listed(artifact).items())}
    assert done.commit is not None
    assert done.commit.startswith(f"{hub.url}/{REPO}/commit/")


def test_a_dry_run_lists_the_same_and_asks_nobody(hub, artifact):
    planned = q.upload(artifact, REPO, dry_run=True)
    assert hub.repos == {}
    assert hub.seen == []
    assert planned.commit is None
    assert planned.files == q.upload(artifact, REPO).files


def test_a_cut_connection_is_tried_again(hub, artifact):
    hub.fail("PUT", "", CUT, CUT)
    q.upload(artifact, REPO)
    assert on_hub(hub) == listed(artifact)


def test_an_abandoned_upload_is_resumed(hub, artifact):
    """What was whole on the hub is not sent again; nothing is seen before the commit."""
    hub.fail("PUT", "", Fault(), *[CUT] * 100)
    with pytest.raises(q.FetchError) as error:
        upload_artifact(artifact, REPO, sleep=lambda _: None)
    assert "run the same command again to resume" in error.value.left
    assert on_hub(hub) == {}
    (first,) = hub.uploads
    hub.heal()
    q.upload(artifact, REPO)
    assert on_hub(hub) == listed(artifact)
    assert hub.uploads.count(first) == 1
    shards = [name for name in listed(artifact) if name.endswith(".safetensors")]
    assert len(hub.uploads) == len(shards) > 1


def test_a_busy_commit_is_tried_again(hub, artifact):
    hub.fail("commit", REPO, Fault(status=503))
    q.upload(artifact, REPO)
    assert on_hub(hub) == listed(artifact)


def test_a_second_upload_changes_nothing(hub, artifact):
    q.upload(artifact, REPO)
    before = len(hub.uploads)
    q.upload(artifact, REPO)
    assert on_hub(hub) == listed(artifact)
    assert len(hub.uploads) == before


@pytest.mark.parametrize("private", [False, True])
def test_a_new_repository_is_as_private_as_asked(hub, artifact, private):
    q.upload(artifact, REPO, private=private)
    assert hub.repos[REPO].private == private


def test_without_a_token_the_hub_s_no_is_told(hub, artifact, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(q.FetchError, match="renew HF_TOKEN"):
        q.upload(artifact, REPO)
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(q.FetchError, match=r"with no token\n.*\n.*set HF_TOKEN, or log in"):
        q.upload(artifact, REPO)


def test_what_is_on_the_hub_is_downloaded_before_it_is_verified_or_sent_on():
    """`verify` and `upload` take a folder or a file; other commands take names on the hub too."""
    for ask in (partial(q.verify, REPO), partial(q.upload, REPO, "me/other")):
        with pytest.raises(q.FormatError, match=f"qwen35 download {REPO} -o DIR, and give DIR"):
            ask()


def test_what_was_downloaded_is_what_was_converted(hub, artifact, tmp_path):
    q.upload(artifact, REPO)
    q.download(REPO, tmp_path / "copy")
    (shard, *_) = sorted((tmp_path / "copy").glob("*.safetensors"))
    assert SafetensorsFile(shard).infos == SafetensorsFile(artifact / shard.name).infos


def test_a_gguf_file_gets_a_card(hub, nano, tmp_path):
    out = tmp_path / "nano.gguf"
    q.convert(nano, out, "gguf-q8_0")
    q.upload(out, REPO)
    assert set(on_hub(hub)) == {"nano.gguf", "nano.gguf.receipt.json", "README.md"}
    card = on_hub(hub)["README.md"].decode()
    assert "library_name: gguf" in card
    assert "| Q8_0 |" in card


def spoilt(artifact: Path, name: str, content: str | None) -> None:
    if content is None:
        (artifact / name).unlink()
    else:
        (artifact / name).write_text(content)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("qwen35-receipt.json", None, "is missing"),
        ("qwen35-receipt.json", "{}", "is not a receipt"),
        ("config.json", None, "config.json is missing"),
        ("tokenizer.json", "{}", "the receipt says"),
    ],
)
def test_what_is_not_as_its_receipt_says_is_refused(hub, tmp_path, name, content, said):
    source = write_checkpoint(tmp_path / "in", hub_config(), make_weights(hub_config()))
    q.convert(source, tmp_path / "out", "bf16-split", q.RunOptions(verify=False))
    spoilt(tmp_path / "out", name, content)
    with pytest.raises(q.FormatError, match=said) as error:
        q.upload(tmp_path / "out", REPO)
    assert error.value.exit_code == 3
    assert hub.repos == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda r: r["output"]["files"].pop("config.json"), "config.json is not listed"),
        (lambda r: r["output"]["files"].pop("model.safetensors"), "model.safetensors is not"),
        (lambda r: r.update(verdict={"passed": False}), "failed its verification"),
        (lambda r: r.update(verdict={"passed": "no"}), "failed its verification"),
        (lambda r: r.update(verdict={"passed": True, "failures": ["x"]}), "failed its"),
    ],
)
def test_a_receipt_that_is_not_of_a_whole_and_right_model_is_refused(tmp_path, change, said):
    source = write_checkpoint(tmp_path / "in", hub_config(), make_weights(hub_config()))
    q.convert(source, tmp_path / "out", "bf16-split", q.RunOptions(verify=False))
    path = tmp_path / "out" / "qwen35-receipt.json"
    receipt = json.loads(path.read_bytes())
    change(receipt)
    path.write_text(json.dumps(receipt))
    with pytest.raises(q.FormatError, match=said):
        q.upload(tmp_path / "out", REPO, dry_run=True)


def test_the_command_line(hub, artifact):
    run = CliRunner().invoke
    planned = run(app, ["upload", str(artifact), REPO, "--dry-run"])
    assert planned.exit_code == 0
    assert "dry run: nothing was sent" in planned.stdout
    formatted = run(app, ["upload", str(artifact), REPO, "--dry-run", "--output-format", "json"])
    assert json.loads(formatted.stdout)["files"]
    done = run(app, ["upload", str(artifact), REPO, "--json"])
    assert json.loads(done.stdout)["repo"] == REPO
    wrong = run(app, ["upload", str(artifact), "no-repository", "--dry-run"])
    assert "is not the name of a repository" in str(wrong.exception)
    assert wrong.exception.exit_code == 2
