"""A hostile input: a good checkpoint, harmed in one way, and the exit code that is due.

Every case begins as the same small text model in one file, linked into a fresh folder `in`. `harm`
changes that folder; `source` says what is then given to `convert`, relative to it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from formats.family.slots import Form
from tests.checkpoints import make_weights, text_config, write_checkpoint

INPUT, MISUSED, DONE = 3, 2, 0
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# A weight of the good model: [160, 96] in BF16.
TARGET = "model.layers.0.mlp.up_proj.weight"
Harm = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Case:
    """What is done to a good checkpoint, and what must come of it.

    kind    the part of the program that has to refuse it
    code    exit code: 3 input refused, 2 misused, 0 accepted because nothing of it is harmful
    recipe  a recipe file's bytes, or None for bf16-split
    memory  most bytes by which the process may grow, if only for a moment
    """

    kind: str
    name: str
    harm: Harm
    code: int = INPUT
    source: str = "."
    recipe: bytes | None = None
    overrides: tuple[str, ...] = ()
    memory: int = 64 << 20

    @property
    def id(self) -> str:
        """How pytest names the case."""
        return f"{self.kind}-{self.name}"


def small_config(**changes: Any) -> dict[str, Any]:
    """Return the config of the good model: two layers of odd sizes, no MTP."""
    types = ["linear_attention", "full_attention"]
    return text_config(
        sizes="ragged",
        num_hidden_layers=2,
        layer_types=types,
        mtp_num_hidden_layers=0,
        linear_value_head_dim=16,
        **changes,
    )


def write_good(folder: Path) -> Path:
    """Write the good model."""
    config = small_config()
    weights = make_weights(config, Form(vision=False, mtp_layers=0), namespace="text")
    return write_checkpoint(folder, config, weights)


def link_good(good: Path, folder: Path) -> Path:
    """Link the good model's files into a new folder: a harm replaces, it never writes into them."""
    folder.mkdir()
    for path in good.iterdir():
        os.link(path, folder / path.name)
    return folder


def replace(path: Path, content: bytes | str) -> None:
    """Put a new file in the place of a linked one."""
    path.unlink(missing_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def hole(path: Path, nbytes: int, start: bytes = b"") -> None:
    """Put a file of so many bytes there that takes no room on the disk."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.write(start)
        file.truncate(nbytes)


def read_file(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return a safetensors file's header, as it stands, and its data."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(text: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """Return a safetensors file; `length` is what it says of its header."""
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def harm_header(change: Callable[[dict[str, Any]], object]) -> Harm:
    """Return a harm that changes the header's entries and leaves the data."""

    def harm(folder: Path) -> None:
        header, data = read_file(folder / WEIGHTS)
        change(header)
        replace(folder / WEIGHTS, with_header(json.dumps(header).encode(), data))

    return harm


def harm_entry(name: str = TARGET, **fields: Any) -> Harm:
    """Return a harm that changes fields of one tensor's entry."""
    return harm_header(lambda header: header[name].update(fields))


def harm_file(name: str, content: bytes | str) -> Harm:
    """Return a harm that replaces one file."""
    return lambda folder: replace(folder / name, content)


def harm_config(changes: Mapping[str, Any]) -> Harm:
    """Return a harm that changes fields of config.json; `rope_parameters.x` is one inside."""

    def harm(folder: Path) -> None:
        config = small_config()
        for field, value in changes.items():
            part, _, last = field.rpartition(".")
            (config[part] if part else config)[last] = value
        replace(folder / "config.json", json.dumps(config))

    return harm


def index_of(folder: Path, **changes: str) -> dict[str, Any]:
    """Return a right index of the good model, with other files for some tensors."""
    header, _ = read_file(folder / WEIGHTS)
    where = {name: WEIGHTS for name in header if name != "__metadata__"} | changes
    return {"metadata": {"total_size": 1}, "weight_map": where}
