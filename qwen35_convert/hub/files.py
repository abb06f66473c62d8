"""Which files of a repository a conversion reads, and how each is compared with the hub's listing.

Small files are identified by their git blob id, large ones (LFS) by their SHA-256.
Trap: names in an index are untrusted and become paths; only plain relative ones pass.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from formats.safetensors.adapters import ADAPTER_CONFIG, ADAPTER_FILES, adapters
from formats.safetensors.folder import SIDE_FILES as CARRIED
from formats.safetensors.methods import BESIDE
from formats.safetensors.nested import is_nested
from formats.side_names import CONFIG
from qwen35_convert.errors import FetchError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from mmap import mmap
    from pathlib import Path

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Beside those that are carried, licences of any ending.
SIDE_FILES = (CONFIG, INDEX, ADAPTER_CONFIG, *BESIDE, *CARRIED, "LICENSE*", "NOTICE*")
MERGE_FIRST = "give it as SOURCE, and the model that it changes as --base"
WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_SHARD = re.compile(r"(?:[A-Za-z0-9_-][A-Za-z0-9_.-]*/)*[A-Za-z0-9_-][A-Za-z0-9_.-]*\.safetensors")


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file must be: LFS files have a sha256, small ones a git blob id."""

    size: int
    sha256: str | None
    git_id: str | None

    def proof(self) -> Proof:
        """Return an empty proof, which takes the file's bytes in order."""
        return Proof(self)


class Proof:
    """The hashes of a file while its bytes arrive, and what they must be in the end."""

    def __init__(self, entry: Entry) -> None:
        self._entry, self._count, self._sha256 = entry, 0, hashlib.sha256()
        by_git = entry.sha256 is None and entry.git_id is not None
        self._git = hashlib.sha1(b"blob %d\0" % entry.size) if by_git else None

    def update(self, data: bytes | bytearray | memoryview | mmap) -> None:
        """Take the next bytes."""
        self._count += len(data)
        self._sha256.update(data)
        if self._git:
            self._git.update(data)

    def sha256(self) -> str:
        """Return the SHA-256 of the bytes so far."""
        return self._sha256.hexdigest()

    def wrong(self) -> tuple[str, str] | None:
        """Return (got, expected) if the bytes are not the file's, else None."""
        entry = self._entry
        if self._count != entry.size:
            return f"{self._count} bytes", f"{entry.size} bytes"
        if self._git and self._git.hexdigest() != entry.git_id:
            return f"git blob {self._git.hexdigest()}", f"git blob {entry.git_id}"
        if entry.sha256 and self.sha256() != entry.sha256:
            return f"sha256 {self.sha256()}", f"sha256 {entry.sha256}"
        return None


def measure(path: Path, entry: Entry) -> tuple[str, tuple[str, str] | None]:
    """Return (sha256, None) of a correct file, else ("", (got, expected))."""
    size = path.stat().st_size
    if size != entry.size:
        return "", (f"{size} bytes", f"{entry.size} bytes")
    proof, buffer = entry.proof(), memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            proof.update(buffer[:count])
    wrong = proof.wrong()
    return ("", wrong) if wrong else (proof.sha256(), None)


def needed(
    repo: str, names: Collection[str], weight_map: dict[str, str] | None, remedy: str
) -> list[str]:
    """Return the files of `names` that a conversion reads; FetchError if one is missing.

    weight_map  which shard holds a tensor, as the index says; None: there is no index
    """
    shards = [SINGLE] if weight_map is None else sorted(set(weight_map.values()))
    if SINGLE in names and SINGLE not in shards:  # opening them decides which is the model
        shards = [SINGLE, *(shards if {*shards} <= {*names} else [])]
    missing = sorted({CONFIG, *shards}.difference(names))
    if missing and (ADAPTER_CONFIG in names or adapters(names)):
        raise FetchError(repo, "an adapter (LoRA)", "a whole model", MERGE_FIRST)
    if weight_map is None and SINGLE in missing:
        raise _no_safetensors(repo, sorted(n for n in names if n.endswith(WEIGHTS)), remedy)
    if missing:
        got = "no " + ", ".join(missing[:3]) + (" ..." if missing[3:] else "")
        raise FetchError(f"{repo} is incomplete", got, "config.json and all weights", remedy)
    return side_files(names) + shards


def side_files(names: Collection[str]) -> list[str]:
    """Return the files of `names` that are read whatever the weights are, the index among them."""
    return sorted(n for n in names if _is_side(n) and not n.endswith((*WEIGHTS, ".py")))


def _is_side(name: str) -> bool:
    if "/" in name:
        return is_nested(name)
    return any(fnmatchcase(name, pattern) for pattern in SIDE_FILES)


def _no_safetensors(repo: str, weights: list[str], remedy: str) -> FetchError:
    got = ", ".join(weights[:3]) + (" ..." if weights[3:] else "") or "no weights"
    if weights and weights[0].endswith((".safetensors", ".gguf")):
        remedy = f"fetch one file (hf download {repo} {weights[0]}) and give its path"
    elif weights:
        remedy = "torch.load it, safetensors.torch.save_file it (transformers would drop mtp.*)"
    return FetchError(f"{repo} has no {SINGLE}", got, f"{INDEX} or {SINGLE}", remedy)


def read_weight_map(repo: str, index: bytes) -> dict[str, str]:
    """Return which shard holds a tensor; FetchError for a name that is no path below a folder."""
    try:
        weight_map = dict(json.loads(index)["weight_map"].items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        got = f"{type(error).__name__}: {error}"
        raise FetchError(f"{repo}: {INDEX}", got, "weight_map", "see its page") from None
    for shard in weight_map.values():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard):
            expected = "a relative path that ends in .safetensors"
            raise FetchError(
                f"{repo}: {INDEX} names", repr(shard), expected, "use another repository"
            )
    return weight_map


def needed_of_adapter(
    repo: str, names: Collection[str], _weight_map: dict[str, str] | None, remedy: str
) -> list[str]:
    """Return the files of an adapter; FetchError if one is missing."""
    missing = sorted({*ADAPTER_FILES}.difference(names))
    if missing:
        expected = f"an adapter (LoRA) as PEFT saves it: {', '.join(ADAPTER_FILES)}"
        raise FetchError(repo, f"no {', '.join(missing)}", expected, remedy)
    return sorted(ADAPTER_FILES)


@dataclass(frozen=True, slots=True)
class Kind:
    """What a repository is fetched as.

    config  the file that it must have
    needed  returns which of its files are read
    """

    config: str
    needed: Callable[[str, Collection[str], dict[str, str] | None, str], list[str]]


MODEL = Kind(CONFIG, needed)
ADAPTER = Kind(ADAPTER_CONFIG, needed_of_adapter)
