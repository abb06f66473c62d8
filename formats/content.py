"""What a file is whose content is not what its name says: told by its first bytes.

Asked only where a file could not be read as what it is called.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 64  # bytes that are enough to tell
DOWNLOAD = "download it again"


@dataclass(frozen=True, slots=True)
class Content:
    """A kind of content.

    starts  what such a file begins with, in lower case
    what    the kind, as the end of a sentence
    fix     what to do
    """

    starts: tuple[bytes, ...]
    what: str
    fix: str


POINTER = Content(
    (b"version https://git-lfs.github.com/spec/", b"version https://hawser.github.com/spec/"),
    "is a git-lfs pointer, not the file that it stands for",
    "run `git lfs pull` in the repository, or download the file itself",
)
KINDS = (
    POINTER,
    Content(
        (b"<!doctype", b"<html", b"<?xml", b"<head"),
        "is a web page, not the file that its address shows",
        "download the file itself: its address has /resolve/ where the page has /blob/",
    ),
    Content(
        (
            b"entry not found",
            b"repository not found",
            b"not found",
            b"access to model",
            b"invalid ",
            b"unauthorized",
            b"forbidden",
            b'{"error',
        ),
        "is an answer of the hub that refuses the file",
        "download it again, with a token that may read it",
    ),
    Content((b"gguf",), "is a GGUF file", "give it a name that ends in .gguf"),
    Content(
        (b"pk\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
        "is a pickle of torch.save, which can run code when it is read",
        "save the model again as .safetensors, as save_pretrained() does",
    ),
    Content(
        (b"\x1f\x8b", b"bzh", b"\xfd7zxz", b"7z\xbc\xaf", b"(\xb5/\xfd"),
        "is compressed",
        "unpack it",
    ),
    Content((b"\0" * 16,), "begins with zeros: its download was not finished", DOWNLOAD),
)


def content_of(first: bytes) -> Content | None:
    """Return what begins like this, None if nobody knows."""
    text = first[:FIRST].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return next((kind for kind in KINDS if text.startswith(kind.starts)), None)
