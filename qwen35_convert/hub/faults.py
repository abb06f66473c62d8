"""What a request to the hub that failed means: whether to try again, when, and what to do else.

Source: huggingface_hub 2.4, its errors, and httpx's under them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from formats.missing import near
from qwen35_convert.errors import FetchError, SaveError

LONGEST_WAIT = 300.0  # seconds; the hub counts requests in windows of five minutes
PASSING = frozenset({408, 429, 500, 502, 503, 504})
LATER = "run again later; finished files are kept"


class Asked(NamedTuple):
    """What was asked for."""

    endpoint: str
    repo: str
    revision: str


class Told(NamedTuple):
    """What is said of an error, filled in from `_facts`."""

    subject: str
    got: str
    expected: str
    fix: str


# By the class of an error, the nearest of those that it derives from.
TOLD = {
    "GatedRepoError": Told(
        "{repo} is gated",
        "{answer}",
        "a token with access",
        "log in and accept the terms at {page}, then set HF_TOKEN, or: hf auth login",
    ),
    "RepositoryNotFoundError": Told(
        "{repo} is not at {endpoint}",
        "{answer}",
        "a repository there, or a local path",
        "check the name; if private, set HF_TOKEN, or: hf auth login{local}",
    ),
    "RevisionNotFoundError": Told(
        "{repo} has no {revision}",
        "{answer}",
        "a branch, a tag or a commit",
        "see {page}/tree/main",
    ),
    "HfHubHTTPError": Told("{what}", "{answer}", "HTTP 200", "{by_status}"),
    "Exception": Told(
        "{what}",
        "{line}",
        "a hub at {endpoint}",
        "check the network and HF_ENDPOINT, and {later}; HF_HUB_OFFLINE=1 uses the cache{local}",
    ),
}
# By the status of an answer, and whether a token was sent.
BY_STATUS = {
    (401, True): "the token was refused: renew HF_TOKEN, or log in: hf auth login",
    (401, False): "set HF_TOKEN, or log in: hf auth login",
    **dict.fromkeys(((403, True), (403, False)), "use a token that may read it, or write it"),
}


def explained(error: Exception, what: str, asked: Asked) -> FetchError:
    """Return what is told of a request for `what` that is not tried again."""
    if isinstance(error, OSError) and error.filename:
        place = f"{error.filename}: {error.strerror}"
        fix = "choose another folder: -o, or HF_HOME for the cache"
        return SaveError(f"{what} cannot be saved", place, "a folder to write to", fix)
    facts = _facts(error, what, asked)
    told = next(TOLD[kind.__name__] for kind in type(error).__mro__ if kind.__name__ in TOLD)
    return FetchError(*(text.format(**facts) for text in told))


def _facts(error: Exception, what: str, asked: Asked) -> dict[str, str]:
    from huggingface_hub.errors import HfHubHTTPError

    here = near(Path(asked.repo))
    sent = error.response.request.headers if isinstance(error, HfHubHTTPError) else {}
    with_token = "authorization" in sent
    return {
        **asked._asdict(),
        "what": what,
        "line": line(error),
        "later": LATER,
        "page": f"{asked.endpoint}/{asked.repo}",
        "local": f"; a path that exists is {here}" if here else "",
        "answer": f"HTTP {status(error)}, with {'a' if with_token else 'no'} token",
        "by_status": BY_STATUS.get((status(error), with_token), LATER),
    }


def root(error: Exception) -> Exception:
    """Return the cause of "not found locally", or of "error while uploading".

    huggingface_hub raises these for most faults.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    wraps = isinstance(error, LocalEntryNotFoundError) or type(error) is RuntimeError
    cause = error.__cause__ if wraps else None
    return cause if isinstance(cause, Exception) else error


def status(error: Exception) -> int:
    """Return the HTTP status of an answer, 0 if there was none."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def passes(error: Exception) -> bool:
    """Whether to try again: after a cut, a short body, a busy server; not with a full disk."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]

    if isinstance(error, HfHubHTTPError):
        signed = "authorization" not in error.response.request.headers  # 403: its time ran out
        return status(error) in PASSING or (status(error) == 403 and signed)
    short_body = type(error) is OSError and not error.errno
    return short_body or isinstance(error, (HTTPError, RuntimeError))


def wait(error: Exception, attempt: int) -> float:
    """Return the wait that a server demands (the hub: RateLimit: "api";r=0;t=55), or 1, 2, 4, 8."""
    headers = getattr(getattr(error, "response", None), "headers", {})
    text = f"after={headers.get('Retry-After')}; {headers.get('RateLimit')}"
    demand = re.search(r"(?:after|r=0; ?t)=(\d+)", text)
    return min(LONGEST_WAIT, float(demand[1]) if demand else 2.0**attempt)


def line(error: Exception) -> str:
    """Return an error's first line, without signatures and tokens."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"hf_\w+", "hf_...", re.sub(r"\?\S+", "?...", text.splitlines()[0]))
