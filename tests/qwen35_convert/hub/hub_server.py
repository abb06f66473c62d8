"""A stand-in for the hub on the loopback interface: real HTTP, made-up files, faults on demand.

    GET  /api/models/{repo}[/revision/{rev}][?blobs=true]    sha and siblings
    GET  /api/models/{repo}/tree/{rev}                       the same listing, the other way
    HEAD, GET /{repo}/resolve/{rev}/{file}                   small files here, LFS files by redirect
    HEAD, GET /cdn/{repo}/{sha}/{file}                       a second server: another origin

Source: what huggingface_hub 2.4 sends and reads (hf_api.py, file_download.py, utils/_http.py).
Trap: the client follows a redirect to the same origin with its token, and stops at another one; so
the CDN is a server of its own, and tests can ask whether a token ever reached it.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import struct
import threading
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import huggingface_hub
import numpy as np
from huggingface_hub import constants
from safetensors.numpy import save

from tests.qwen35_convert.hub.hub_uploads import Receiving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path
    from types import TracebackType

    import pytest

# What may lead huggingface_hub elsewhere, or keep it from asking.
SETTINGS = (
    "HF_TOKEN",
    "HUGGING_FACE_HUB_TOKEN",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HTTP_PROXY",
    "http_proxy",
    "ALL_PROXY",
    "all_proxy",
)
LFS = (".safetensors", ".bin", ".gguf", ".onnx")
_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/([^/]+)/?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_CDN = re.compile(r"/cdn/([^/]+/[^/]+)/([0-9a-f]{40})/(.+)")


@lru_cache(maxsize=1024)
def git_id(data: bytes) -> str:
    """The name git gives to a file's bytes, and the hub's ETag of a small file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def checkpoint(seed: int = 0, shards: int = 2) -> dict[str, bytes]:
    """A made-up repository: what a conversion needs, and much that it must leave alone."""
    random = np.random.default_rng(seed)
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    tensors = {f"t{i}": random.standard_normal((37, 53)).astype(np.float32) for i in range(shards)}
    files = {name: save({t: tensors[t]}) for name, t in zip(names, tensors, strict=True)}
    index = {"metadata": {"total_size": 1}, "weight_map": dict(zip(tensors, names, strict=True))}
    return files | {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "config.json": json.dumps({"model_type": "qwen3_5", "seed": seed}).encode(),
        "tokenizer.json": b"{}" * 4000,
        "LICENSE": b"Apache-2.0\n",
        "README.md": b"# made up\n",
        "pytorch_model.bin": random.bytes(200),
        "model-q8_0.gguf": random.bytes(200),
        "modeling_custom.py": b"raise SystemExit\n",
        "onnx/model.onnx": random.bytes(200),
        ".gitattributes": b"*.safetensors filter=lfs\n",
    }


@dataclass(frozen=True)
class Fault:
    """One answer that goes wrong; as it stands, one that does not.

    status       this, instead of the file
    retry_after  with the status
    cut, reset   the body ends after n bytes: by a closed connection, or by a broken one
    body         another file
    flip         another byte at this place of the answer
    grow         n bytes more than asked for, or fewer
    whole        the whole file, whatever range was asked for
    headers      other headers
    at           only an answer that holds this byte of the file; others pass by, and do not count
    """

    status: int = 0
    retry_after: str = ""
    cut: int = -1
    reset: bool = False
    body: bytes | None = None
    flip: int = -1
    grow: int = 0
    whole: bool = False
    headers: tuple[tuple[str, str], ...] = ()
    at: int = -1

    def spoil(self, body: bytes) -> bytes:
        """Return what is sent instead of `body`."""
        if 0 <= self.flip < len(body):
            body = body[: self.flip] + bytes([body[self.flip] ^ 1]) + body[self.flip + 1 :]
        return body[: len(body) + self.grow] if self.grow < 0 else body + bytes(self.grow)


@dataclass(frozen=True)
class Seen:
    """One request as it came in."""

    server: str
    method: str
    path: str
    authorization: str
    range: str
    user_agent: str


@dataclass
class Repo:
    """Commits by sha, branches by name."""

    gated: bool = False
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Add a commit, move `branch` to it, return its sha."""
        text = repr((len(self.commits), sorted((n, git_id(d)) for n, d in files.items())))
        sha = hashlib.sha1(text.encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha


class Hub:
    """Both servers, running between `with` and its end; `faults` are used up in order."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.tokens: set[str] = set()
        self.large: dict[str, bytes] = {}  # of uploads, by SHA-256
        self.uploads: list[str] = []
        self.seen: list[Seen] = []
        self.faults: dict[tuple[str, str], list[Fault]] = defaultdict(list)
        self.after: Callable[[Seen], None] = lambda seen: None
        self.lock = threading.Lock()
        self._servers = [_Server("hub", self), _Server("cdn", self)]
        self.url, self.cdn = (f"http://127.0.0.1:{s.server_address[1]}" for s in self._servers)

    def __enter__(self) -> Hub:
        for server in self._servers:
            poll = {"poll_interval": 0.01}
            threading.Thread(target=server.serve_forever, kwargs=poll, daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def repo(self, name: str, **flags: bool) -> Repo:
        """Add an empty repository."""
        self.repos[name] = Repo(**flags)
        return self.repos[name]

    def fail(self, what: str, name: str, *faults: Fault) -> None:
        """Let the next requests go wrong: "api" of a repo, or "HEAD" or "GET" of a file."""
        self.faults[what, name] += faults

    def heal(self) -> None:
        """Take back what has not gone wrong yet."""
        self.faults.clear()

    def got(self, method: str = "GET", server: str = "") -> list[str]:
        """Names of the files asked for, in order."""
        asked = [s for s in self.seen if s.method == method and not s.path.startswith("/api/")]
        return [unquote(s.path.split("/", 5)[5]) for s in asked if s.server == (server or s.server)]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, name: str, hub: Hub) -> None:
        self.name, self.hub = name, hub
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle is what some tests are about."""


class _Handler(Receiving, BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer waits 40 ms for a delayed ACK
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        """Keep stderr for the program under test."""

    def do_GET(self) -> None:
        hub, path = self.server.hub, urlsplit(self.path).path
        values = {k: self.headers.get(k, "") for k in ("Authorization", "Range", "User-Agent")}
        seen = Seen(self.server.name, self.command, path, *values.values())
        hub.seen.append(seen)
        if self.server.name == "cdn":
            self._cdn(path)
        else:
            self._hub(path)
        hub.after(seen)

    do_HEAD = do_GET

    def large(self, file: str) -> bool:
        """Whether the hub stores a file of this name as a large one."""
        return _large(file)

    def oid(self, file: str, data: bytes) -> str:
        """What the hub calls a file's content."""
        return _sha256(data) if _large(file) else git_id(data)

    def _hub(self, path: str) -> None:
        for pattern, answer in (
            (_INFO, self._info),
            (_TREE, self._tree),
            (_RESOLVE, self._resolve),
        ):
            if match := pattern.fullmatch(path):
                name, revision, *file = match.groups()
                if found := self._found(name, unquote(revision or "main"), open_if_gated=not file):
                    answer(name, found, *(unquote(f) for f in file))
                return
        self._refuse(404, "", "no such page")

    def _found(self, name: str, revision: str, *, open_if_gated: bool) -> str:
        """The sha, or "" after an error was sent."""
        repo = self.server.hub.repos.get(name)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        known = token in self.server.hub.tokens
        if token and not known:
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        if repo is None or (repo.private and not known):
            return self._refuse(404 if known else 401, "RepoNotFound", "Repository not found")
        if repo.gated and not known and not open_if_gated:
            return self._refuse(401, "GatedRepo", f"Access to model {name} is restricted.")
        sha = repo.branches.get(revision, revision)
        if sha not in repo.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return sha

    def _refuse(self, status: int, code: str, message: str, **more: str) -> str:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {}) | more
        self._send(status, json.dumps({"error": message}).encode(), headers)
        return ""

    def _fault(self, what: str, name: str, span: range = range(1 << 60)) -> Fault:
        """Return the next fault, if it is about one of these bytes of the file."""
        with self.server.hub.lock:
            faults = self.server.hub.faults.get((what, name))
            if faults and (faults[0].at < 0 or faults[0].at in span):
                return faults.pop(0)
        return Fault()

    def _failed(self, fault: Fault) -> bool:
        if not fault.status:
            return False
        more = {"Retry-After": fault.retry_after} if fault.retry_after else {}
        self._refuse(fault.status, "", "try later", **more)
        return True

    def _info(self, name: str, sha: str) -> None:
        fault = self._fault("api", name)
        if self._failed(fault):
            return
        siblings = []
        for file, data in self.server.hub.repos[name].commits[sha].items():
            row = {"rfilename": file, "size": len(data), "blobId": git_id(data)}
            siblings.append(
                row | ({"lfs": _lfs(data) | {"pointerSize": 134}} if _large(file) else {})
            )
        body = {"id": name, "modelId": name, "sha": sha, "siblings": siblings}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"}, fault)

    def _tree(self, name: str, sha: str) -> None:
        rows = []
        for file, data in self.server.hub.repos[name].commits[sha].items():
            row = {"type": "file", "path": file, "size": len(data), "oid": git_id(data)}
            lfs = {"oid": _lfs(data)["sha256"], "size": len(data), "pointerSize": 134}
            rows.append(row | ({"lfs": lfs} if _large(file) else {}))
        self._send(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, sha: str, file: str) -> None:
        data = self.server.hub.repos[name].commits[sha].get(file)
        if data is None:
            self._refuse(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": sha})
            return
        headers = {"X-Repo-Commit": sha, "ETag": f'"{git_id(data)}"'}
        if not _large(file):
            self._body(file, data, headers)
            return
        fault = self._fault("HEAD", file) if self.command == "HEAD" else Fault()
        if not self._failed(fault):
            linked = {"X-Linked-Etag": f'"{_lfs(data)["sha256"]}"', "X-Linked-Size": str(len(data))}
            target = {"Location": f"{self.server.hub.cdn}/cdn/{name}/{sha}/{file}?Signature=secret"}
            self._send(302, b"", headers | linked | target, fault)

    def _cdn(self, path: str) -> None:
        match = _CDN.fullmatch(path)
        assert match, f"the client made up a CDN address: {path}"
        name, sha, file = match.groups()
        data = self.server.hub.repos[name].commits[sha][unquote(file)]
        self._body(unquote(file), data, {"ETag": f'"{_lfs(data)["sha256"]}"'})

    def _body(self, file: str, data: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        changed = self.headers.get("If-Range", headers["ETag"]) != headers["ETag"]
        first = int(asked[1]) if asked and not changed else 0
        stop = (
            min(int(asked[2]) + 1, len(data)) if asked and asked[2] and not changed else len(data)
        )
        fault = self._fault(self.command, file, range(first, stop))
        if self._failed(fault):
            return
        if fault.body is not None:
            data, stop = fault.body, len(fault.body)
        if asked is None or changed or fault.whole:
            self._send(200, data, headers | {"Accept-Ranges": "bytes"}, fault)
        else:
            more = {"Content-Range": f"bytes {first}-{stop - 1}/{len(data)}"}
            self._send(206, data[first:stop], headers | more, fault)

    def _send(
        self, status: int, body: bytes, headers: Mapping[str, str], fault: Fault | None = None
    ) -> None:
        fault = fault or Fault()
        body = fault.spoil(body)
        self.send_response(status)
        length = {"Content-Length": str(len(body))}
        for key, value in (length | dict(headers) | dict(fault.headers)).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault.cut < 0:
            self.wfile.write(body)
            return
        self.wfile.write(body[: fault.cut])
        self.wfile.flush()
        self.close_connection = True
        if fault.reset:  # no FIN but RST: the client sees a broken connection, not a short body
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()


def _large(file: str) -> bool:
    return PurePosixPath(file).suffix in LFS


@lru_cache(maxsize=1024)
def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _lfs(data: bytes) -> dict[str, Any]:
    return {"sha256": _sha256(data), "size": len(data)}


def point_to(hub: Hub, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub ask this hub, with an empty cache in `home` and no token."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(home / "home"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))


@contextmanager
def only_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Give a hub of our own that huggingface_hub asks, without waiting anywhere."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    with Hub() as hub:
        point_to(hub, home, monkeypatch)
        huggingface_hub.close_session()
        yield hub
        huggingface_hub.close_session()
