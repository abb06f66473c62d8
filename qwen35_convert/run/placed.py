"""Where encoded rows of a weight go in its parts: one after another, or into every line.

Where columns come first in the file, as in GPTQ's layout, some rows are a piece of each line, and a
write for each piece takes longer than encoding it. So rows are held until pieces are long.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.part import Part
from qwen35_convert.planning.plan import Output

if TYPE_CHECKING:
    from torch import Tensor

Piece = tuple[Output, int, memoryview]
# Of a worker's memory, for rows that are held.
HELD = 0.5


def shared_out(parts: Sequence[Part], chunk_bytes: int) -> tuple[int, int]:
    """Return the memory for rows that are held, and what is left for encoding."""
    room = int(chunk_bytes * HELD) if any(part.transposed for part in parts) else 0
    return room, chunk_bytes - room


class Placed:
    """The parts of one item, filled range by range of its rows.

    room  bytes of rows that may be held
    """

    def __init__(self, outputs: Sequence[Output], parts: Sequence[Part], room: int) -> None:
        by_key = {part.key: part for part in parts}
        self._parts: dict[str, _Rows | _Lines] = {
            output.key: _Lines(output, by_key[output.key], room)
            if by_key[output.key].transposed
            else _Rows(output, by_key[output.key])
            for output in outputs
        }

    def pieces(self, encoded: Mapping[str, Tensor]) -> list[Piece]:
        """Return what these rows, and those before, put where; to be used before the next call."""
        return [piece for key, data in encoded.items() for piece in self._parts[key].pieces(data)]


@dataclass(slots=True)
class _Rows:
    """A part whose rows follow one another; `at`: the byte of the next one."""

    output: Output
    part: Part
    at: int = 0

    def pieces(self, data: Tensor) -> Iterator[Piece]:
        yield self.output, self.at, as_bytes(data)
        if self.part.rows is not None:
            self.at += data.nbytes


@dataclass(slots=True)
class _Lines:
    """A part whose columns come first: `held` rows of it lie in `lines` [C, R], after `first`."""

    output: Output
    part: Part
    room: int
    first: int = 0
    held: int = 0
    lines: Tensor | None = None

    def pieces(self, data: Tensor) -> Iterator[Piece]:
        count = len(data)
        if self.lines is None:
            most = max(count, self.room // data[:1].nbytes)
            self.lines = data.new_empty(data.shape[1], min(most, self.part.info.shape[-1]))
        self.lines[:, self.held : self.held + count] = data.mT
        self.held += count
        left = self.part.info.shape[-1] - self.first - self.held
        if not left or self.held + min(count, left) > self.lines.shape[1]:
            yield from self._all(self.lines)

    def _all(self, lines: Tensor) -> Iterator[Piece]:
        """Yield the rows that are held, a piece of each line, or the whole part."""
        size, whole = lines.element_size(), as_bytes(lines)
        length, width = self.part.info.shape[-1] * size, self.held * size
        if width == length:
            yield self.output, 0, whole
        else:
            for column in range(len(lines)):
                at = column * length + self.first * size
                yield self.output, at, whole[column * lines.shape[1] * size :][:width]
        self.first, self.held = self.first + self.held, 0


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's bytes in order, without a copy where it is contiguous."""
    import torch

    return memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data)
