"""What the stand-in for the hub does with uploads: large files first, then one commit.

    POST /api/repos/create                            409 if it is there
    POST /api/validate-yaml                           the front matter of a README.md
    POST /api/models/{repo}/preupload/{rev}           large or small, and what is there of it
    POST /{repo}.git/info/lfs/objects/batch           where to put what is not there yet
    PUT  /lfs/{sha256}                                one large file
    POST /api/models/{repo}/commit/{rev}              lines of JSON: small files and hashes of large

Source: what huggingface_hub 2.4 sends and reads (_commit_api.py, lfs.py), without Xet.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREUPLOAD = re.compile(r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)")
_BATCH = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")
_COMMIT = re.compile(r"/api/models/([^/]+/[^/]+)/commit/([^/]+)")
_LFS = re.compile(r"/lfs/([0-9a-f]{64})")
JSON = {"Content-Type": "application/json"}


class Receiving:
    """The half of a handler that takes uploads; the other half sends."""

    def do_POST(self) -> None:
        path, body = self.path.partition("?")[0], self._received()
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._send(200, b'{"warnings": [], "errors": []}', JSON)
        elif match := _PREUPLOAD.fullmatch(path):
            self._preupload(match[1], json.loads(body)["files"])
        elif _BATCH.fullmatch(path):
            self._batch(json.loads(body)["objects"])
        elif match := _COMMIT.fullmatch(path):
            self._commit(match[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._refuse(404, "", "no such page")

    def do_PUT(self) -> None:
        oid = _LFS.fullmatch(self.path)[1]
        fault = self._fault("PUT", "")
        if fault.cut >= 0:  # the connection breaks while the file is on its way
            self.rfile.read(fault.cut)
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.close_connection = True
            self.connection.close()
            return
        body = self._received()
        if self._failed(fault):
            return
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.hub.uploads.append(oid)
        self.server.hub.large[oid] = body
        self._send(200, b"", {})

    def _received(self) -> bytes:
        length = self.headers.get("Content-Length")
        if length is not None:
            return self.rfile.read(int(length))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _known(self) -> bool:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token not in self.server.hub.tokens:
            self._refuse(401, "", "Invalid username or password.")
            return False
        return True

    def _create(self, asked: Mapping[str, Any]) -> None:
        if not self._known():
            return
        name, hub = f"{asked['organization']}/{asked['name']}", self.server.hub
        status = 409 if name in hub.repos else 200
        if name not in hub.repos:
            private = bool(asked.get("private")) or asked.get("visibility") == "private"
            hub.repo(name, private=private).commit({})
        self._send(
            status, json.dumps({"url": f"{hub.url}/{name}", "error": "exists"}).encode(), JSON
        )

    def _preupload(self, name: str, files: list[dict[str, Any]]) -> None:
        there = self._files(name)
        rows = []
        for file in files:
            mode, path = ("lfs" if self.large(file["path"]) else "regular"), file["path"]
            known = there.get(path)
            oid = None if known is None else self.oid(path, known)
            rows.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._send(200, json.dumps({"files": rows}).encode(), JSON)

    def _batch(self, objects: list[dict[str, Any]]) -> None:
        hub, rows = self.server.hub, []
        for one in objects:
            row = {"oid": one["oid"], "size": one["size"]}
            if one["oid"] not in hub.large:
                row["actions"] = {"upload": {"href": f"{hub.url}/lfs/{one['oid']}", "header": {}}}
            rows.append(row)
        body = {"transfer": "basic", "objects": rows}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/vnd.git-lfs+json"})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        if not self._known() or self._failed(self._fault("commit", name)):
            return
        hub, files = self.server.hub, dict(self._files(name))
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile":
                files[value["path"]] = hub.large[value["oid"]]
            else:
                assert line["key"] == "file"
                files[value["path"]] = base64.b64decode(value["content"])
        sha = hub.repos[name].commit(files)
        url = f"{hub.url}/{name}/commit/{sha}"
        body = {"success": True, "commitOid": sha, "commitUrl": url, "hookOutput": ""}
        self._send(200, json.dumps(body).encode(), JSON)

    def _files(self, name: str) -> dict[str, bytes]:
        repo = self.server.hub.repos[name]
        return repo.commits[repo.branches["main"]]
