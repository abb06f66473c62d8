"""What a weight becomes in a form, and what that costs its product with the inputs of a text.

    error = sum over columns k of   mean of x_k^2 * sum over rows (decode(encode(w)) - w)^2

That is the mean square, over the text's tokens, of the change in a linear's outputs, as far as
columns are independent. An expert's inputs count over all tokens, so one that few reach costs
little. Rows of an embedding that is only looked up count alike.

Weights are encoded as the hub has them, row by row. GGUF tiles the heads along the columns of
out_proj, so there other pairs of heads share a super-block of 256.

Shape letters: N rows, K columns of a weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING

from formats.checkpoint import Checkpoint
from formats.family.roles import ROLES
from formats.stored import KEEP
from quant.ggml.kinds import POOR_UNWEIGHTED
from quant.importance import importance
from quant.opening import open_value
from quant.stored import Value, each_row
from qwen35_convert.fit.sizes import scheme_of_form
from qwen35_convert.planning.plan import Item
from qwen35_convert.recipe.parts import FORMATS, NEAREST
from qwen35_convert.recipe.recipe import Recipe
from qwen35_convert.run.worker import Preparation

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.imatrix import Imatrix

Through = Callable[["Tensor"], "Tensor"]
HELD = 28  # bytes of an element: what is encoded, decoded, and the difference in float64


@dataclass(frozen=True, slots=True)
class Rounded(Value):
    """A value whose rows are read as a form gives them back."""

    through: Through = lambda w: w

    def exact(self, start: int, stop: int) -> Tensor:
        """Return rows start to stop, decoded."""
        return self.through(Value.exact(self, start, stop))

    def pick(self, index: Tensor) -> Tensor:
        """Return these rows, decoded."""
        return self.through(Value.pick(self, index))


@dataclass
class Rounder:
    """Rounds the weights of a source to forms, as a recipe encodes them.

    imatrix  of the text: what errors weigh; where the recipe has its weights encoded by an
             importance, also what they are encoded with
    """

    source: Checkpoint
    recipe: Recipe
    imatrix: Imatrix

    def knows(self, item: Item, form: str) -> bool:
        """Whether the recipe may give a weight this form: some need an importance."""
        poor = FORMATS[self.recipe.export.format].mixes and form.upper() in POOR_UNWEIGHTED
        return not poor or ROLES[item.atom.role].vocabulary or self._weighed(item)

    def rounded(self, value: Value, item: Item, form: str) -> Value:
        """Return a weight as it is read after it was stored in a form."""
        if form == KEEP:
            return value
        own = {one.name: getattr(value, one.name) for one in fields(Value)}
        return Rounded(**own, through=self._through(item, form))

    def error(self, item: Item, form: str) -> float:
        """Return what a form costs a weight: see the module's head."""
        if form == KEEP:
            return 0.0
        value, through = open_value(self.source, item.atom), self._through(item, form)
        weights, total = self._mean_squares(item), 0.0
        for start, stop in value.chunks(held=HELD):
            w = value.exact(start, stop)
            total += float((through(w).double() - w.double()).square().sum(0) @ weights)
            value.release(start, stop)
        return total

    def _mean_squares(self, item: Item) -> Tensor:
        """Return the mean square of each column's input over all tokens, float64 [K]."""
        import torch

        sums = self.imatrix.sums.get(item.atom.name)
        if sums is None:
            rows, columns = item.atom.shape
            return torch.full((columns,), 1.0 / rows, dtype=torch.float64)
        return sums / self.imatrix.tokens

    def _through(self, item: Item, form: str) -> Through:
        scheme = scheme_of_form(form, self.recipe)
        prepared = self._prepared.of(replace(item, scheme=scheme))
        weighed = self._weighed(item) and (
            scheme.calibrated or FORMATS[self.recipe.export.format].mixes
        )
        columns = self._importance(item) if weighed else None

        def through(w: Tensor) -> Tensor:
            parts = scheme.encode(w, prepared, columns)
            return scheme.decode(each_row(scheme, parts, tuple(w.shape)))

        return through

    @cached_property
    def _prepared(self) -> Preparation:
        return Preparation(self.source)

    def _weighed(self, item: Item) -> bool:
        """Whether the recipe encodes a weight by what a text says of its columns."""
        choice = self.recipe.quantize
        wanted = choice.imatrix is not None or choice.method != NEAREST
        return wanted and item.atom.name in self.imatrix.sums

    def _importance(self, item: Item) -> Tensor | None:
        """Return the mean square of each column's input where it counts; None: nothing is known."""
        import torch

        name = item.atom.name
        sums, count = self.imatrix.row(name)
        known = importance(name, sums, torch.tensor([float(count)]), item.atom.shape)
        return None if known.blank else known.values[0]
