"""ggml's types with a code for each column, whose codes GPTQ can choose: see `ggml_grids`.

The type's own encoder takes the scales of every super-block, with the diagonal of the Hessian for
its importance. Under these scales codes make up for each other's errors, as those of INT4 do; now
and then the encoder is asked again, for what each weight should be given all others.

Codes that were chosen so need not be the nearest. Files say in their metadata that theirs were, and
then weights are judged as those of four bits are, by `quant.fourbit.judge`.

Shape letters: N rows, K columns, B bytes of a row.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quant.errors import QuantError
from quant.fourbit.ggml_grids import (
    CODES,
    codes_of,
    gaps_of,
    put_codes,
    steps_of,
    take_codes,
)
from quant.ggml import codec
from quant.ggml.scheme import BLOCKS, Ggml

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from quant.fourbit.hessian import Factor
    from quant.fourbit.judge import Decoded
    from quant.measure import Error
    from quant.scheme import Prepared


@dataclass(frozen=True, slots=True)
class GgmlCodes(Ggml):
    """One of the types in `ggml_grids.CODES`.

    fed_back  whether the file says that codes make up for each other's errors
    """

    fed_back: bool = False

    @property
    def calibrated(self) -> bool:
        """Return True: scales suit a text, codes are chosen by GPTQ."""
        return True

    @property
    def together(self) -> bool:
        """Return False: its encoder of scales runs on the CPU."""
        return False

    def encode(
        self,
        w_NK: Tensor,
        prepared: Prepared = None,
        importance: Tensor | None = None,
        out: Tensor | None = None,
        factor: Factor | None = None,
    ) -> dict[str, Tensor]:
        """Return the blocks, uint8 [N, B], in `out` if given."""
        if factor is None:
            return super(GgmlCodes, self).encode(w_NK, prepared, importance, out)
        blocks = self.feed_back(w_NK.cpu(), factor)
        return {BLOCKS: blocks if out is None else out.view(blocks.shape).copy_(blocks)}

    def feed_back(self, w_NK: Tensor, factor: Factor) -> Tensor:
        """Return blocks whose codes GPTQ chooses, uint8 [N, B]."""
        return feed_back(self.type, w_NK, factor)

    def decoded(self, w_NK: Tensor, blocks_NB: Tensor) -> Decoded:
        """Return what blocks hold of a weight, for `judge_rows`."""
        return decoded(self.type, w_NK, blocks_NB)

    def compare(
        self,
        w_NK: Tensor,
        rows: Mapping[str, Tensor],
        importance: Tensor | None = None,
        *,
        weighed: bool = False,
    ) -> Error:
        """Return how far the blocks are from the weight, and which strips are wrong."""
        if not self.fed_back:
            return super(GgmlCodes, self).compare(w_NK, rows, importance, weighed=weighed)
        from quant.fourbit.judge import judge_rows
        from quant.measure import measure

        w, blocks = (x.reshape(-1, x.shape[-1]) for x in (w_NK, rows[BLOCKS]))
        stored = self.decoded(w, blocks)
        try:
            ours = codec.decode(self.type, codec.encode(self.type, w), w.shape[1])
        except QuantError:  # what our encoder refuses has nothing to be beside
            return measure(w, stored.values)
        return judge_rows(w, stored, ours)

    def judge(self, error: Error) -> list[str]:
        """Return the faults of its blocks, a gain and a bias."""
        if not self.fed_back:
            return super(GgmlCodes, self).judge(error)
        from quant.fourbit.judge import judge_whole

        codes = CODES[self.type]
        return judge_whole(error, codes.group, codes.bits)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of some rows, uint8 [N, B], whose scales the type's own encoder chooses."""

    type: str
    data: Tensor

    def part(self, rows: slice) -> Blocks:
        """Return those of some of the rows."""
        return Blocks(self.type, self.data[rows])

    def steps(self, wanted_NK: Tensor, weights_K: Tensor) -> tuple[Tensor, Tensor]:
        """Return steps and zeros that suit these weights, as before if no block can hold them."""
        with suppress(QuantError):
            self.data.copy_(codec.encode(self.type, wanted_NK, importance=weights_K))
        return steps_of(self.type, self.data)[:2]


def feed_back(name: str, w_NK: Tensor, factor: Factor, passes: int | None = None) -> Tensor:
    """Return blocks whose codes GPTQ chooses, uint8 [N, B].

    passes  as `choose_units` has them; None: as usual

    QuantError as for `codec.encode`.
    """
    import torch

    from quant.fourbit.calibrate import Grid, choose_units, weights_of
    from quant.fourbit.passes import PASSES
    from quant.fourbit.rows import TABLE

    passes = PASSES if passes is None else passes
    known, group = weights_of(factor.diagonal), CODES[name].group
    blocks = codec.encode(name, w_NK, importance=known)
    step, zero, _ = steps_of(name, blocks)
    grid = Grid(step.view(-1), zero.view(-1), step.view(-1))
    form = Blocks(name, blocks)
    bits = TABLE if CODES[name].values else CODES[name].bits
    units, _ = choose_units(w_NK, grid, factor, bits, passes=passes, form=form)
    _, zero, same = (x.repeat_interleave(group, 1) for x in steps_of(name, blocks))
    chosen = torch.where(same, take_codes(name, blocks), codes_of(name, units, zero))
    return put_codes(name, blocks, chosen)


def decoded(name: str, w_NK: Tensor, blocks_NB: Tensor) -> Decoded:
    """Return what blocks hold of a weight, for `judge_rows`."""
    from quant.fourbit.columns import is_usual, spread
    from quant.fourbit.judge import Decoded

    codes, columns = CODES[name], w_NK.shape[1]
    step, zero, same = steps_of(name, blocks_NB)
    step = step.where(~same, 0.0)
    least, largest = codes.values[:1] + codes.values[-1:] or (codes.least, codes.end - 1)
    ends = ((end - zero) * step for end in (least, largest))
    low, high = (spread(end, None, columns) for end in ends)
    stored = take_codes(name, blocks_NB)
    outward = (stored == codes.end - 1).int() - (stored == codes.least).int()
    return Decoded(
        codec.decode(name, blocks_NB, columns),
        gaps_of(name, stored) * spread(step.abs(), None, columns),
        outward * spread(step.sign(), None, columns),
        is_usual(w_NK, codes.span * step.abs(), None),
        codes.group,
        (w_NK - low) * (w_NK - high) > 0,
    )
