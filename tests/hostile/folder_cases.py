"""Hostile folders: an index that points elsewhere, links, side files, code that must not run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.hostile.case import (
    DONE,
    INDEX,
    TARGET,
    WEIGHTS,
    Case,
    Harm,
    harm_file,
    hole,
    index_of,
    replace,
)

PLACES = {
    "parent": "../model.safetensors",
    "far-parent": "../" * 40 + "etc/passwd.safetensors",
    "hidden-parent": "x/../../model.safetensors",
    "absolute": "/etc/passwd",
    "absolute-safetensors": "/tmp/model.safetensors",
    "here": "./model.safetensors",
    "below": "sub/model.safetensors",
    "backslash": "..\\model.safetensors",
    "empty": "",
    "dot": ".",
    "dots": "..",
    "no-suffix": "model",
    "pickle": "pytorch_model.bin",
    "nul": "model\0.safetensors",
    "newline": "model\n.safetensors",
    "absent": "b.safetensors",
    "long": "m" * 300 + ".safetensors",
    "very-long": "m" * 100_000 + ".safetensors",
    "surrogate": "\ud800.safetensors",
    "escape": "\x1b[2J.safetensors",
    "drive": "C:model.safetensors",
    "address": "http://127.0.0.1/model.safetensors",
    "home": "~/model.safetensors",
    "variable": "$HOME.safetensors",
    "stream": "model.safetensors:x",
}
VALUES: dict[str, Any] = {
    "null": None,
    "number": 1,
    "list": [WEIGHTS],
    "object": {"file": WEIGHTS},
    "boolean": True,
}
INDEXES = {
    "empty": b"",
    "null": b"null",
    "list": b"[]",
    "no-map": b"{}",
    "map-null": b'{"weight_map":null}',
    "map-empty": b'{"weight_map":{}}',
    "map-list": b'{"weight_map":[]}',
    "cut": b'{"weight_map":',
    "map-text": b'{"weight_map":"model.safetensors"}',
    "nan": b'{"weight_map":NaN}',
    "bad-utf-8": b'{"weight_map":{"\xff":"a"}}',
    "deep": b'{"weight_map":' * 100_000,
    "twice": b'{"weight_map":{"a":"b.safetensors","a":"c.safetensors"}}',
    "map-twice": b'{"weight_map":{},"weight_map":{"a":"b"}}',
    "name-escape": b'{"weight_map":{"\\u001b[31m":"model.safetensors"}}',
    "name-unknown": b'{"weight_map":{"model.evil":"model.safetensors"}}',
}


def cases() -> Iterator[Case]:
    """Yield every case of this kind."""
    for name, file in PLACES.items():
        yield Case("index", f"points-to-{name}", _points(file))
    for name, value in VALUES.items():
        yield Case("index", f"points-to-{name}", _points(value))
    for name, content in INDEXES.items():
        yield Case("index", name, harm_file(INDEX, content))
    yield Case("index", "of-half-the-tensors", _half_an_index)
    yield Case("index", "a-pipe", _fifo(INDEX))
    yield Case("index", "of-65-mb", lambda folder: hole(folder / INDEX, 65 << 20, b"{"))
    yield from _links()
    yield from _sides()
    yield from _harmless()


def _points(file: Any) -> Harm:
    return lambda folder: replace(folder / INDEX, json.dumps(index_of(folder, **{TARGET: file})))


def _half_an_index(folder: Path) -> None:
    index = index_of(folder)
    names = sorted(index["weight_map"])
    index["weight_map"] = dict.fromkeys(names[::2], WEIGHTS)
    replace(folder / INDEX, json.dumps(index))


def _links() -> Iterator[Case]:
    for file in ("config.json", WEIGHTS, "tokenizer.json", "README.md", "LICENSE"):
        name = file.replace(".", "-").lower()
        yield Case("link", f"{name}-out-of-the-folder", _link(file, "../secret"))
        yield Case("link", f"{name}-to-an-absolute-path", _link(file, "/etc/hostname"))
    for file in ("config.json", WEIGHTS):
        name = file.replace(".", "-")
        yield Case("link", f"{name}-to-itself", _link(file, file))
        yield Case("link", f"{name}-to-nothing", _link(file, "nowhere"))
        yield Case("link", f"{name}-to-a-device", _link(file, "/dev/zero"))
    yield Case("link", "index-out-of-the-folder", _link(INDEX, "../secret"))
    yield Case("link", "a-shard-of-the-index-out-of-the-folder", _shard_link)
    yield Case("link", "a-cycle-of-two", _cycle)
    yield Case("link", "by-way-of-a-folder", _by_folder)
    yield Case("link", "a-false-hub-cache", _false_cache, source="../models--a--b/snapshots/1")
    yield Case("link", "endless", _link("x", "."), source="x/x/x/x/x/x/nothing")


def _link(file: str, target: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder.parent / "secret").write_bytes(b"{}")
        (folder / file).unlink(missing_ok=True)
        (folder / file).symlink_to(target)

    return harm


def _shard_link(folder: Path) -> None:
    """Let the index name a link to a good file that lies elsewhere."""
    (folder / WEIGHTS).rename(folder.parent / "secret")
    (folder / WEIGHTS).symlink_to("../secret")
    replace(folder / INDEX, json.dumps(index_of(folder)))


def _cycle(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("b.safetensors")
    (folder / "b.safetensors").symlink_to(WEIGHTS)


def _by_folder(folder: Path) -> None:
    (folder.parent / "secret").write_bytes(b"years of work")
    (folder / "sub").symlink_to("..")
    (folder / "README.md").symlink_to("sub/secret")


def _false_cache(folder: Path) -> None:
    """Make a folder look like the hub's cache, whose links lead to its blobs, with other blobs."""
    (folder.parent / "elsewhere").mkdir()
    (folder.parent / "elsewhere" / "key").write_bytes(b"years of work")
    snapshot = folder.parent / "models--a--b" / "snapshots" / "1"
    shutil.copytree(folder, snapshot)
    (snapshot.parents[1] / "blobs").symlink_to("../elsewhere")
    (snapshot / "README.md").symlink_to("../../blobs/key")


def _sides() -> Iterator[Case]:
    gib = 1 << 30
    for file in ("tokenizer.json", "tokenizer.model", "vocab.json", "README.md", "LICENSE"):
        name = file.replace(".", "-").lower()
        yield Case("side", f"{name}-of-a-gib", _large(file, gib))
    yield Case("side", "config-of-a-gib", _large("config.json", gib))
    yield Case("side", "config-of-65-mb", _large("config.json", 65 << 20))


def _large(file: str, nbytes: int) -> Harm:
    return lambda folder: hole(folder / file, nbytes, b"{")


def _harmless() -> Iterator[Case]:
    """Yield what is accepted, because what could harm is neither run nor carried along."""
    code = 'raise SystemExit("run")\n'
    files = {
        "code": "modeling_evil.py",
        "hub-config": "hubconf.py",
        "hidden": ".env",
        "pickle": "x.bin",
        "site": "sitecustomize.py",
        "trailing-dots": "tokenizer.json..",
        "upper": "CONFIG.JSON",
    }
    for name, file in files.items():
        yield Case("stray", name, harm_file(file, code), code=DONE)
    for file in ("tokenizer.json", "README.md"):
        name = file.replace(".", "-").lower()
        yield Case("stray", f"{name}-is-a-folder", _folder(file), code=DONE)
        yield Case("stray", f"{name}-is-a-fifo", _fifo(file), code=DONE)
    yield Case("stray", "a-link-inside-the-folder", _inner_link, code=DONE)
    yield Case("stray", "an-endless-folder", _link("loop", "."), code=DONE)
    yield Case(
        "stray", "the-hub-cache", _true_cache, code=DONE, source="../models--a--b/snapshots/1"
    )


def _folder(file: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        (folder / file).mkdir()

    return harm


def _fifo(file: str) -> Harm:
    def harm(folder: Path) -> None:
        (folder / file).unlink(missing_ok=True)
        os.mkfifo(folder / file)

    return harm


def _inner_link(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / WEIGHTS).rename(folder / "sub" / "real")
    (folder / WEIGHTS).symlink_to("sub/real")


def _true_cache(folder: Path) -> None:
    snapshot = folder.parent / "models--a--b" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "blobs").mkdir()
    for path in folder.iterdir():
        shutil.copy(path, snapshot.parents[1] / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
