"""Publish an artifact: exactly the files that its receipt lists, the receipt, and a card.

    receipt -> files, each held against its hash -> the repository -> large files -> one commit

Large files go first, each retried; the hub keeps what it has whole, so the same command resumes,
and the repository shows nothing before the one commit that names everything.

Source: huggingface_hub 2.4, `HfApi.preupload_lfs_files` and `create_commit`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formats.checkpoint import Checkpoint
from formats.errors import FormatError
from formats.json_file import read_object
from formats.safetensors.folder import DOCUMENTS
from qwen35_convert.card.front_matter import README
from qwen35_convert.card.of_gguf import card_of_gguf
from qwen35_convert.containers.gguf.mmproj_check import mmproj_beside
from qwen35_convert.containers.registry import container_of, open_checkpoint
from qwen35_convert.errors import FetchError, RecipeError
from qwen35_convert.failure import Failure
from qwen35_convert.hub.client import Hub, check_name, is_offline, open_hub
from qwen35_convert.verification.receipts import changed_files, read_receipt
from qwen35_convert.write.digests import Digests

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

AGAIN = "convert it again: a receipt lists what belongs to a model"
LEFT = "what is whole on the hub is kept there; run the same command again to resume"


@dataclass(frozen=True, slots=True)
class Uploaded:
    """What is, or would be, in the repository.

    files   size of each file by name
    commit  the commit's page; None: nothing was sent
    """

    repo: str
    files: Mapping[str, int]
    commit: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as `upload --json` prints it."""
        return {"repo": self.repo, "files": {**self.files}, "commit": self.commit}


def upload_artifact(
    artifact: Path,
    repo: str,
    *,
    private: bool = False,
    dry_run: bool = False,
    workers: int = 1,
    sleep: Callable[[float], object] | None = None,
) -> Uploaded:
    """Upload an artifact to the repository `repo`, which is made if there is none.

    private  make it private; one that is there stays what it is
    dry_run  return what would be there, and use no network
    sleep    called with the seconds between the tries of a failing request; None: time.sleep

    FormatError for an artifact without a receipt, that is not what its receipt says, or that failed
    its verification. FetchError if the hub refuses or does not answer.
    """
    _check_repo(repo)
    contents = _contents(open_checkpoint(artifact), workers)
    sizes = {n: len(c) if isinstance(c, bytes) else c.stat().st_size for n, c in contents.items()}
    if dry_run:
        return Uploaded(repo, sizes)
    if is_offline():
        subject = f"{repo}, offline (HF_HUB_OFFLINE)"
        raise FetchError(subject, "an upload", "no use of the network", "unset HF_HUB_OFFLINE")
    hub = open_hub(repo, None, sleep)
    from huggingface_hub.utils.tqdm import disable_progress_bars

    bars = nullcontext() if sys.stderr.isatty() else disable_progress_bars("huggingface_hub")
    try:
        with bars:
            return Uploaded(repo, sizes, _send(hub, contents, private=private))
    except FetchError as error:
        error.left = LEFT
        raise


def _check_repo(repo: str) -> None:
    """Refuse what is no repository's name, before anything is read. RecipeError."""
    with suppress(FetchError):
        check_name(repo, None)
        if "@" not in repo:
            return
    raise RecipeError(repr(repo), "is not the name of a repository", "owner/name")


def _contents(opened: Checkpoint, workers: int) -> dict[str, Path | bytes]:
    """Return every file of an artifact by its name on the hub."""
    container = container_of(opened)
    path = container.receipt_of(container.whole(opened))
    receipt = read_receipt(opened)
    if receipt is None:
        raise FormatError(f"{path} is missing", fix=AGAIN)
    if isinstance(receipt, Failure):
        raise FormatError(receipt.tensor, receipt.problem, fix=AGAIN)
    if receipt.verdict is not None and not receipt.verdict.passed:
        raise FormatError(path.name, "says that the model failed its verification", fix=AGAIN)
    places = {name: path.parent / name for name in receipt.output}
    with Digests(workers) as digests:
        for name, problem in changed_files(receipt.output, _judged(places), digests):
            raise FormatError(name, problem, fix=AGAIN)
    needed = {opened.name_of(place) for place in opened.read_files()}
    for name in sorted(needed - receipt.output.keys()):
        raise FormatError(name, f"is not listed in {path.name}", "a receipt of the whole", AGAIN)
    there = {name: place for name, place in places.items() if place.is_file()}
    card = {} if container.carded else {README: _card(opened, path)}
    return dict(sorted((there | {path.name: path} | card).items()))


def _card(opened: Checkpoint, receipt: Path) -> bytes:
    """Return the card of a file, which has none inside."""
    tower = mmproj_beside(opened)
    name = tower.name if tower else None
    return card_of_gguf(opened, read_object(receipt), receipt.name, mmproj=name)


def _judged(places: Mapping[str, Path]) -> dict[str, Path]:
    """Return the files that must be as the receipt lists them: a card may be written anew."""
    return {name: place for name, place in places.items() if name not in DOCUMENTS}


def _send(hub: Hub, contents: Mapping[str, Path | bytes], *, private: bool) -> str:
    """Send all files in one commit; return its page."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(hub.endpoint)
    make = partial(api.create_repo, hub.repo, private=private or None, exist_ok=True)
    hub.tried(make, f"making {hub.repo}")
    adds = [CommitOperationAdd(name, content) for name, content in contents.items()]
    for add in adds:
        hub.tried(partial(_send_large, api, hub.repo, add), f"{hub.repo}: {add.path_in_repo}")
    message = f"Upload {len(adds)} files with qwen35"
    commit = partial(api.create_commit, hub.repo, adds, commit_message=message)
    return str(hub.tried(commit, f"the commit to {hub.repo}").commit_url)


def _send_large(api: Any, repo: str, add: CommitOperationAdd) -> None:
    """Send a file if the hub stores it as a large one, and has it not."""
    api.preupload_lfs_files(repo, [add])
