"""The structure of a GGUF file, judged by its header: what llama.cpp would refuse, or read wrongly.

It aborts in the middle of a computation over a norm that is not F32, it loads as many MTP layers as
the metadata say whatever the tensors are, and it indexes the embedding by the tokens of the
vocabulary, all without looking.
"""

from __future__ import annotations

from collections.abc import Iterator

from formats.checkpoint import Checkpoint
from formats.family.roles import ROLES
from formats.gguf.checkpoint import first_file
from formats.gguf.keys import shown
from formats.gguf.names import ALIASES
from formats.gguf.rope import SECTION_KEYS, SECTIONS
from qwen35_convert.failure import Failure

MTP = "mtp."
UNSCALED = ("embed",)
TOKENS = "tokenizer.ggml.tokens"
REQUIRED = ("tokenizer.ggml.model", "tokenizer.ggml.pre", TOKENS, "tokenizer.ggml.merges")


def gguf_failures(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield everything that the header shows to be wrong."""
    yield from _types(artifact)
    yield from _scales(artifact)
    yield from _others(artifact)
    yield from _mtp(artifact)
    yield from _vocabulary(artifact)


def _types(artifact: Checkpoint) -> Iterator[Failure]:
    infos = artifact.infos()
    for atom in artifact.layout.atoms.values():
        dtype = infos[atom.stored].dtype
        if ROLES[atom.role].gguf_f32 and dtype != "F32":
            yield Failure(atom.stored, f"is {dtype}, but llama.cpp computes {atom.role} in F32")


def _scales(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield scales of NVFP4 weights that are not read: of the MTP block, and of the embedding."""
    for atom in artifact.layout.atoms.values():
        if len(atom.parts) > 1 and (atom.name.startswith(MTP) or atom.role in UNSCALED):
            yield Failure(atom.parts[1], "is a scale that llama.cpp does not apply to this weight")


def _others(artifact: Checkpoint) -> Iterator[Failure]:
    """Yield what only other engines read: their names, their towers, sections that are not four."""
    for atom in artifact.layout.atoms.values():
        name, _, last = atom.stored.rpartition(".")
        if last in ALIASES:
            yield Failure(atom.stored, f"is {name}.{ALIASES[last]} for llama.cpp")
    for stray in artifact.strays:
        yield Failure(first_file(artifact).path.name, f"{stray}; llama.cpp refuses the file")
    sections = f"{first_file(artifact).kv['general.architecture'].value}.{SECTION_KEYS[0]}"
    pair = first_file(artifact).kv.get(sections)
    if pair is None or len(pair.value) != len(SECTIONS):
        got = "is missing" if pair is None else f"has {len(pair.value)} sizes"
        yield Failure(sections, f"{got}, expected {len(SECTIONS)}: llama.cpp refuses the file")


def _mtp(artifact: Checkpoint) -> Iterator[Failure]:
    stated, stored = artifact.config.mtp_layers, artifact.layout.form.mtp_layers
    if stated != stored:
        yield Failure("nextn_predict_layers", f"is {stated}, but {stored} MTP layers are stored")


def _vocabulary(artifact: Checkpoint) -> Iterator[Failure]:
    first = first_file(artifact)
    for key in REQUIRED:
        if key not in first.kv:
            yield Failure(key, "is missing: llama.cpp has no tokenizer without it")
    rows, pair = artifact.config.sizes["V"], first.kv.get(TOKENS)
    tokens = pair.value if pair else None
    if pair and not isinstance(tokens, list):
        yield Failure(TOKENS, f"is {shown(tokens)} ({pair.kind}), expected an array of strings")
    elif tokens is not None and len(tokens) != rows:
        yield Failure(TOKENS, f"has {len(tokens)} tokens, but the embedding has {rows} rows")
