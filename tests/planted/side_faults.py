"""Faults beside the tensors: tokenizer, template, sampling, preprocessors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from tests.planted.artifact import Artifact, Base
from tests.planted.fault import (
    BOTH,
    FORGED,
    STRUCTURE,
    Fault,
    Where,
    in_bases,
)
from tests.planted.side_field_faults import (
    GENERATION,
    IMAGES,
    JSON,
    TEMPLATE,
    TOKENIZER,
    TOKENIZER_CONFIG,
    VIDEOS,
    Change,
)

HOMES = in_bases(
    "nano-fp8-block", "nano-fp8-block-hub", "wide-fp8-channel", "moe-bf16-split", "wide-mixed"
)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 1234\n"


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, (file, change) in JSON.items():
        yield fault(name, partial(edit, file=file, change=change))
    for name, (file, content) in CONTENTS.items():
        yield fault(name, partial(replace, file=file, content=content))
    for file in (TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, GENERATION):
        yield fault(f"{file}-missing", partial(remove, file=file))
    for name, file in (("images", IMAGES), ("videos", VIDEOS)):
        yield fault(f"{name}-missing", partial(remove, file=file), _with_vision)
    yield fault(
        "images-missing-of-text",
        partial(remove, file=IMAGES),
        lambda base: HOMES(base) and not _with_vision(base),
        receipts=(FORGED,),
    )
    for file, more in PAIRS.items():
        yield fault(f"{file}-missing", partial(remove, file=file), _bundled, receipts=(FORGED,))
        yield fault(f"{file}-changed", partial(replace, file=file, content=more), _bundled)


def _bundled(base: Base) -> bool:
    """Whether the model has vocab.json and merges.txt too."""
    return HOMES(base) and base.model == "nano"


def _with_vision(base: Base) -> bool:
    """Whether images are input of the model."""
    return base.output == "fp8-block-hub"


def fault(
    name: str,
    plant: Callable[[Artifact], str],
    where: Where = HOMES,
    receipts: tuple[str, ...] = BOTH,
) -> Fault:
    """Return a fault of this kind."""
    return Fault("side file", name, plant, where, STRUCTURE, receipts=receipts)


def edit(artifact: Artifact, file: str, change: Change) -> str:
    """Change a JSON file and return its name."""
    with artifact.json(file) as value:
        change(value)
    return file


def replace(artifact: Artifact, file: str, content: str | Callable[[bytes], bytes]) -> str:
    """Write a file, or what comes of the one that is there, and return its name."""
    old = artifact.file(file).read_bytes() if callable(content) else b""
    artifact.write(file, content(old) if callable(content) else content)
    return file


def remove(artifact: Artifact, file: str) -> str:
    """Remove a file and return its name."""
    artifact.file(file).unlink()
    return file


def half(content: bytes) -> bytes:
    """Return the first half of a file."""
    return content[: len(content) // 2]


def without_prompt(content: bytes) -> bytes:
    """Return the template without what starts the answer."""
    return b"".join(content.splitlines(keepends=True)[:-1])


CONTENTS: dict[str, tuple[str, str | Callable[[bytes], bytes]]] = {
    "template-cut": (TEMPLATE, half),
    "template-without-prompt": (TEMPLATE, without_prompt),
    "template-empty": (TEMPLATE, ""),
    "template-of-another": (TEMPLATE, "{% for m in messages %}[INST]{{ m.content }}{% endfor %}"),
    "template-a-newline-more": (TEMPLATE, lambda content: content.replace(b"\\n", b"\\n\\n")),
    "tokenizer-empty": (TOKENIZER, ""),
    "tokenizer-cut": (TOKENIZER, half),
    "tokenizer-a-pointer": (TOKENIZER, POINTER.format("0" * 64)),
    "tokenizer-config-a-pointer": (TOKENIZER_CONFIG, POINTER.format("1" * 64)),
    "tokenizer-config-an-empty-object": (TOKENIZER_CONFIG, "{}"),
    "generation-empty": (GENERATION, ""),
    "generation-an-empty-object": (GENERATION, "{}"),
}
PAIRS: dict[str, Callable[[bytes], bytes]] = {
    "vocab.json": lambda content: content.replace(b'"th"', b'"ht"', 1),
    "merges.txt": half,
}
