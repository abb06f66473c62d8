"""Addresses of repositories on the hub, as a browser, git or another tool shows them.

https://huggingface.co/owner/name[/tree/REVISION]     hf.co/owner/name     hf://owner/name@REVISION
https://huggingface.co/owner/name/blob/main/config.json: a file of it, the repository is meant
"""

from __future__ import annotations

import os
import re
from typing import NoReturn
from urllib.parse import unquote, urlsplit

from formats.errors import FormatError

HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co", "hf-mirror.com")
OTHER_KINDS = ("datasets", "spaces", "collections", "papers")
FILE_PAGES = ("blob", "resolve", "raw")
PAGES = ("tree", *FILE_PAGES, "commit", "commits")
EXPECTED = "https://huggingface.co/owner/name, or owner/name"


def repository_at(source: str) -> tuple[str, str | None] | None:
    """Return (owner/name, revision) of an address on the hub; None for what is none.

    FormatError for an address there that is not a whole repository of a model.
    """
    path = _path(source)
    if path is None:
        return None
    parts = [unquote(part) for part in path.split("/") if part]
    parts = parts[1:] if parts[:1] == ["models"] and len(parts) > 2 else parts
    if len(parts) < 2 or parts[0] in OTHER_KINDS:
        raise FormatError(source, "is not a model's page", EXPECTED)
    owner, (name, _, revision), rest = parts[0], parts[1].partition("@"), parts[2:]
    repo = f"{owner}/{name.removesuffix('.git')}"
    if not rest:
        return repo, revision or None
    if rest[0] not in PAGES or len(rest) < 2:
        raise FormatError(source, "is not a model's page", EXPECTED)
    number = 3 if rest[1] == "refs" else 1
    revision, inner = "/".join(rest[1 : 1 + number]), rest[1 + number :]
    _check_inner(source, repo, revision, inner, page=rest[0])
    return repo, None if revision == "main" else revision


def is_address(source: str) -> bool:
    """Tell whether a source is an address of any kind, which no file here has as its name."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", source) is not None


def _path(source: str) -> str | None:
    """Return what follows the host, if that is the hub's."""
    if source.startswith("git@"):
        host, _, path = source.removeprefix("git@").partition(":")
        return path if host in _hosts() else None
    scheme, _, rest = source.rpartition("://")
    if scheme == "hf":
        return rest
    if scheme not in ("", "http", "https"):
        return None
    parts = urlsplit(f"//{rest}")
    return parts.path if parts.netloc.lower() in _hosts() else None


def _hosts() -> tuple[str, ...]:
    return (*HOSTS, urlsplit(os.environ.get("HF_ENDPOINT", "")).netloc.lower() or HOSTS[0])


def _check_inner(source: str, repo: str, revision: str, inner: list[str], *, page: str) -> None:
    """Refuse a folder of a repository, and a file that is a model by itself."""
    path = "/".join(inner)
    if page == "tree" and inner:
        _refuse_inner(source, repo, revision, f"--include '{path}/*'", path)
    if page in FILE_PAGES and (inner[1:] or path.endswith(".gguf")):
        _refuse_inner(source, repo, revision, path, path)


def _refuse_inner(source: str, repo: str, revision: str, what: str, path: str) -> NoReturn:
    raise FormatError(
        source,
        "is a part of a repository",
        "a whole one, or a path here",
        f"hf download {repo} {what} --revision {revision} --local-dir DIR, then give DIR/{path}",
    )
