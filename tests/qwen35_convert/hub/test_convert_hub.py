"""From a repository on the hub to an artifact, in one command, against a hub on the loopback."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.qwen35_convert.hub.hub_server import Hub

ROOT = Path(__file__).parents[3]
REPO = "Qwen/Qwen3.5-nano"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.fixture(scope="module")
def files(nano_path: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in nano_path.iterdir()}


def qwen35(hub: Hub, home: Path, *arguments: object, **extra: str) -> subprocess.CompletedProcess:
    clean = {name: v for name, v in os.environ.items() if not name.startswith("HF_")}
    environment = clean | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(ROOT),
        "NO_PROXY": "*",
        **extra,
    }
    command = [sys.executable, "-m", "qwen35_convert.cli", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Converted:
    """A conversion of a repository: its commit, the caches that it filled, what it wrote."""

    sha: str
    home: Path
    out: Path
    told: dict[str, Any]


@pytest.fixture(scope="module")
def converted(files, tmp_path_factory) -> Converted:
    folder = tmp_path_factory.mktemp("converted")
    with Hub() as hub:
        sha = hub.repo(REPO).commit(files)
        words = ("convert", f"{REPO}@main", "-o", folder / "out", "--json")
        done = qwen35(hub, folder / "home", *words)
    assert done.returncode == 0, done.stderr
    return Converted(sha, folder / "home", folder / "out", json.loads(done.stdout))


def test_a_repository_is_converted_and_its_commit_is_in_the_receipt(converted, files):
    assert converted.told["verify"]["passed"] is True
    source = json.loads((converted.out / "qwen35-receipt.json").read_text())["source"]
    assert (source["repo"], source["revision"]) == (REPO, converted.sha)
    for name, said in source["files"].items():
        assert said["sha256"] == hashlib.sha256(files[name]).hexdigest()


def test_the_cache_serves_the_same_bytes_offline(converted, hub, tmp_path):
    words = ("convert", REPO, "-o", tmp_path / "out")
    done = qwen35(hub, converted.home, *words, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    one, two = ({p.name: p.read_bytes() for p in out.iterdir()}
                for out in (converted.out, tmp_path / "out"))  # fmt: skip
    assert one == two


def test_download_fetches_into_a_folder_that_converts(tmp_path, hub, files):
    hub.repo(REPO).commit(files | {"evil.py": b"raise SystemExit"})
    folder = tmp_path / "model"
    done = qwen35(hub, tmp_path / "home", "download", REPO, "-o", folder)
    assert done.returncode == 0, done.stderr
    assert not (folder / "evil.py").exists()
    done = qwen35(hub, tmp_path / "home", "inspect", folder, "--json")
    assert json.loads(done.stdout)["problems"] == []


@pytest.mark.parametrize(
    ("source", "said"),
    [("Qwen/missing", "Qwen/missing"), (f"{REPO}@nowhere", "nowhere"), ("Qwen/gated", "HF_TOKEN")],
)
def test_what_cannot_be_had_is_refused_with_exit_3(tmp_path, hub, files, source, said):
    hub.repo(REPO).commit(files)
    hub.repo("Qwen/gated", gated=True).commit(files)
    done = qwen35(hub, tmp_path / "home", "convert", source, "-o", tmp_path / "out")
    assert done.returncode == 3, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_offline_without_a_cache_is_refused_with_exit_3(tmp_path, hub):
    done = qwen35(
        hub, tmp_path / "home", "convert", REPO, "-o", tmp_path / "out", HF_HUB_OFFLINE="1"
    )
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
