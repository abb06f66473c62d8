"""The right artifacts that faults are planted into: made once, linked into a folder per fault."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from qwen35_convert import api, measuring
from qwen35_convert.recipe.recipe import read_recipe
from tests.planted.models import write_model

RECEIPT = "qwen35-receipt.json"
MIXED = (
    "quantize.rules=[{match: layers.*.linear_attn.out_proj, scheme: fp8-channel}, "
    "{match: layers.*.self_attn.o_proj, scheme: keep}]"
)
NO_OUTPUT = "quantize.rules=[{match: layers.*.self_attn.o_proj, scheme: keep}]"
# A model's own importance matrix.
IMATRIX = "quantize.imatrix={imatrix}"
# A mix that has most weights in the type that it is named after.
THEIRS = "quantize.mix=llama.cpp"
# Codes that a short text chooses.
BY_GPTQ = ("quantize.method=gptq", "quantize.calibrate.tokens=512")
# output: (bundled recipe, what differs from it)
OUTPUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "fp8-block": ("fp8-block", ()),
    "fp8-block-hub": ("fp8-block-hub", ()),
    "fp8-channel": ("fp8-channel", ()),
    "bf16-split": ("bf16-split", ()),
    "mixed": ("fp8-block", (MIXED,)),
    "sharded": ("fp8-block", ("export.max_shard_size=1MB",)),
    "bf16": ("gguf-bf16", ()),
    "q8_0": ("gguf-q8_0", ()),
    "q6_k": ("gguf-q6_k", ()),
    "q5_k_m": ("gguf-q5_k_m", ()),
    "q4_k_m": ("gguf-q4_k_m", ()),
    "iq4_xs": ("gguf-iq4_xs", ()),
    "iq3_s": ("gguf-iq4_xs", ("quantize.scheme=iq3_s", "quantize.mix=llama.cpp")),
    "mxfp4_moe": ("gguf-mxfp4_moe", ()),
    "split": ("gguf-q8_0", ("export.max_shard_size=1MB",)),
    "mmproj": ("gguf-q8_0", ("vision=keep",)),
    "mmproj-bf16": ("gguf-bf16", ("vision=keep",)),
    "nvfp4a16": ("nvfp4a16", ()),
    "mxfp4a16": ("mxfp4a16", ()),
    "int4-g32": ("int4-g32", ()),
    "int8": ("int8", ()),
    "nvfp4-mixed": ("nvfp4-mixed", ()),
    "fp8-block-kv8": ("fp8-block-kv8", ("quantize.calibrate.tokens=1024",)),
    "nvfp4-file": ("gguf-nvfp4", ()),
    "iq2_xxs": ("gguf-iq2_xxs", (IMATRIX, THEIRS)),
    "iq3_xxs": ("gguf-iq3_xxs", (IMATRIX, THEIRS)),
    "q2_k": ("gguf-q2_k", (IMATRIX, THEIRS)),
    "iq2_xxs-gptq": ("gguf-iq2_xxs", (IMATRIX, THEIRS, *BY_GPTQ)),
    "iq3_xxs-gptq": ("gguf-iq3_xxs", (IMATRIX, THEIRS, *BY_GPTQ)),
    "q2_k-gptq": ("gguf-q2_k", (IMATRIX, THEIRS, *BY_GPTQ)),
    "q4_k_m-gptq": ("gguf-q4_k_m", BY_GPTQ),
    "gptq": ("int4", ("quantize.dialect=gptq", NO_OUTPUT)),
}
HUB = (
    "fp8-block-hub",
    "fp8-block-kv8",
    "nvfp4a16",
    "mxfp4a16",
    "int4-g32",
    "int8",
    "nvfp4-mixed",
    "gptq",
)


@dataclass(frozen=True, slots=True)
class Base:
    """A model converted by a recipe."""

    model: str
    output: str

    @property
    def id(self) -> str:
        """How tests and tables name it."""
        return f"{self.model}-{self.output}"

    @property
    def gguf(self) -> bool:
        """Whether it is a GGUF file, not a folder."""
        return OUTPUTS[self.output][0].startswith("gguf-")

    @property
    def moe(self) -> bool:
        """Whether it has experts."""
        return self.model == "moe"

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.model == "nano"

    @property
    def vision(self) -> bool:
        """Whether a vision file lies beside it."""
        return self.output.startswith("mmproj")

    @property
    def namespace(self) -> str:
        """What precedes the names of its tensors."""
        return "hub" if self.output in HUB else "text"


BASES = tuple(
    Base(*names.split(" "))
    for names in (
        "nano fp8-block",
        "wide fp8-block",
        "moe fp8-block",
        "nano fp8-block-hub",
        "moe fp8-block-hub",
        "wide fp8-channel",
        "moe fp8-channel",
        "nano bf16-split",
        "wide bf16-split",
        "moe bf16-split",
        "wide mixed",
        "moe mixed",
        "wide sharded",
        "nano bf16",
        "wide bf16",
        "nano q8_0",
        "moe q8_0",
        "wide q6_k",
        "wide q5_k_m",
        "wide q4_k_m",
        "moe q4_k_m",
        "wide iq4_xs",
        "wide iq3_s",
        "moe mxfp4_moe",
        "wide split",
        "nano mmproj",
        "wide mmproj-bf16",
    )
)

# Of these only faults of their own kinds are tried: the others do not depend on the scheme.
FEW_BITS = tuple(
    Base(*names.split(" "))
    for names in (
        "nano nvfp4a16",
        "moe nvfp4a16",
        "nano mxfp4a16",
        "nano int4-g32",
        "nano int8",
        "moe nvfp4-mixed",
        "nano nvfp4-file",
        "moe nvfp4-file",
        "wide iq2_xxs",
        "wide iq3_xxs",
        "wide q2_k",
        "wide iq2_xxs-gptq",
        "wide iq3_xxs-gptq",
        "wide q2_k-gptq",
        "wide q4_k_m-gptq",
        "nano gptq",
        "moe gptq",
    )
)


# Of these only faults of their cache.
CACHED = (Base("wide", "fp8-block-kv8"), Base("moe", "fp8-block-kv8"))


@dataclass(slots=True)
class Artifact:
    """A copy of a base: its files are links until they are changed.

    path    what `verify` is given
    source  what it is verified against
    others  where artifacts of other models or recipes are found
    """

    base: Base
    folder: Path
    path: Path
    source: Path
    workshop: Workshop

    @property
    def receipt(self) -> Path:
        """Where the receipt is."""
        if self.base.gguf:
            return self.folder / "model.gguf.receipt.json"
        return self.path / RECEIPT

    def file(self, name: str) -> Path:
        """Return a file's path."""
        return self.path / name if not self.base.gguf else self.folder / name

    def write(self, name: str, content: bytes | str) -> None:
        """Put a new file in the place of a linked one."""
        path = self.file(name)
        path.unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)

    @contextmanager
    def json(self, name: str) -> Iterator[Any]:
        """Give a JSON file's object to be changed, and write it as our converter does."""
        value = json.loads(self.file(name).read_bytes())
        yield value
        self.write(name, json.dumps(value, indent=2, ensure_ascii=False) + "\n")

    def tensor_files(self) -> list[Path]:
        """Return the files that hold tensors, the vision file last."""
        ending = "*.gguf" if self.base.gguf else "*.safetensors"
        home = self.folder if self.base.gguf else self.path
        return sorted(home.glob(ending), key=lambda path: (path.name.startswith("mmproj"), path))

    def strip(self) -> None:
        """Remove the receipt: the artifact is then anybody's."""
        self.receipt.unlink(missing_ok=True)

    def forge(self) -> None:
        """Make the receipt describe the files that lie there."""
        receipt = json.loads(self.receipt.read_bytes())
        home = self.receipt.parent
        present = {path.name for path in home.iterdir() if path.is_file()} - {self.receipt.name}
        receipt["output"]["files"] = {name: _describe(home / name) for name in sorted(present)}
        self.receipt.unlink()
        self.receipt.write_text(json.dumps(receipt, indent=2, ensure_ascii=False) + "\n")


def _describe(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    return {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


@dataclass(slots=True)
class Workshop:
    """Models and bases, made when they are first asked for, below one folder."""

    folder: Path
    count: int = 0
    made: dict[str, Path] = field(default_factory=dict)

    def model(self, name: str, seed: int = 35) -> Path:
        """Return a source model."""
        key = f"source-{seed}-{name}"
        if key not in self.made:
            self.made[key] = write_model(name, self.folder / f"source-{seed}", seed)
        return self.made[key]

    def convert(self, base: Base, seed: int = 35) -> Path:
        """Return the folder that holds a base."""
        key = f"base-{seed}-{base.id}"
        if key not in self.made:
            home = self.folder / key
            home.mkdir()
            out = home / ("model.gguf" if base.gguf else "model")
            name, overrides = OUTPUTS[base.output]
            if IMATRIX in overrides:
                known = self.imatrix(base.model, seed)
                overrides = (IMATRIX.format(imatrix=known), *overrides[1:])
            api.convert(self.model(base.model, seed), out, read_recipe(name, overrides))
            self.made[key] = home
        return self.made[key]

    def imatrix(self, name: str, seed: int = 35) -> Path:
        """Return what matters to a model, by a short text."""
        key = f"imatrix-{seed}-{name}.gguf"
        if key not in self.made:
            measuring.imatrix(self.model(name, seed), self.folder / key, chunks=1)
            self.made[key] = self.folder / key
        return self.made[key]

    def open(self, base: Base, seed: int = 35) -> Artifact:
        """Return a base as it is: only to be read."""
        folder = self.convert(base, seed)
        return Artifact(base, folder, _entry(base, folder), self.model(base.model, seed), self)

    def place(self, base: Base, folder: Path, seed: int = 35) -> Artifact:
        """Return a copy of a base, to be changed, in a new folder."""
        shutil.copytree(self.convert(base, seed), folder, copy_function=os.link)
        return Artifact(base, folder, _entry(base, folder), self.model(base.model, seed), self)

    @contextmanager
    def room(self) -> Iterator[Path]:
        """Give the path of a folder that is not there yet, and remove the folder afterwards."""
        self.count += 1
        folder = self.folder / f"copy-{self.count}"
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _entry(base: Base, folder: Path) -> Path:
    """Return what is named to `verify`: the folder, the file, or the first part of a split one."""
    if not base.gguf:
        return folder / "model"
    return min(path for path in folder.glob("*.gguf") if not path.name.startswith("mmproj"))


@cache
def find_base(name: str) -> Base:
    """Return a base by its id."""
    return next(base for base in (*BASES, *FEW_BITS, *CACHED) if base.id == name)
