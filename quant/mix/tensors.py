"""What a mix chooses for: the tensors of a GGUF file, and the facts of its model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

TOP = -1


@dataclass(frozen=True, slots=True)
class MixTensor:
    """A tensor of the file: its GGUF name and shape (rows, columns), whatever the source.

    weights  our names of what it holds: one, or one for each expert
    """

    name: str
    role: str
    shape: tuple[int, ...]
    weights: tuple[str, ...]

    @property
    def block(self) -> int:
        """N of `blk.N.`, or -1."""
        return _split(self.name)[0]

    @property
    def kind(self) -> str:
        """The name without block and ending: `attn_qkv`, `nextn.eh_proj`, `token_embd`."""
        return _split(self.name)[1]


@cache  # a mix asks thousands of times
def _split(name: str) -> tuple[int, str]:
    """Return block and kind of a GGUF name."""
    if not name.startswith("blk."):
        return TOP, name.removesuffix(".weight")
    _, block, kind = name.split(".", 2)
    return int(block), kind.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Facts:
    """What a mix depends on besides the tensors.

    num_layers   decoder layers; blocks from there on are the MTP head's
    num_experts  0 for a dense model
    gqa          query heads per key head
    tied         the head is the embedding
    imatrix      an importance matrix is used
    unknown      GGUF names of tensors that it says nothing of
    """

    num_layers: int
    num_experts: int
    gqa: int
    tied: bool
    imatrix: bool
    unknown: frozenset[str] = frozenset()
