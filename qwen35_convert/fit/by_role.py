"""Costs by role, for a model that was not measured: those of small trained models of the family.

    KL = 1e-3 * sensitivity(kind, place of the layer) / layers of the kind * error(form)

These are the numbers behind our own mixes (quant.mix.ours), with the errors of schemes beside them.
They say in which order to spend bytes. How many nats the whole loses is an estimate: no released
model was measured. Weights of zeros and checkpoints too large to run can be fitted so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from formats.checkpoint import Checkpoint
from formats.gguf.names import gguf_name
from formats.stored import KEEP
from quant.ggml.kinds import POOR_UNWEIGHTED, WEIGHTED_ONLY
from quant.mix.ours import place_of, sensitivity_of
from quant.mix.ours_table import ERROR, UNWEIGHTED_ERROR
from quant.mix.tensors import Facts, MixTensor
from qwen35_convert.fit.sizes import Sizes, Unit
from qwen35_convert.planning.plan import Item

BY_ROLE = "by-role"
NOTE = "by role, as small trained models lose it; not measured on this model"
NATS = 1e-3
EMBED = "embed"
# As ERROR, KL against that of the same weights in Q4_K: all linears of a small dense model.
SCHEME_ERROR = {
    "int4": 2.07, "nvfp4a16": 1.78, "fp8-channel": 0.139, "fp8-block": 0.139, "int8": 0.0102,
    KEEP: 0.0,
}  # fmt: skip
EXACT = {"bf16": 0.0, "f32": 0.0}
FORM_ERROR, UNWEIGHTED = (
    {type_.lower(): error for type_, error in errors.items()} | SCHEME_ERROR | EXACT
    for errors in (ERROR, UNWEIGHTED_ERROR)
)
Spot = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ByRole:
    """Costs of the units of one source.

    facts   of its model
    layers  how many have each kind of tensor
    """

    facts: Facts
    layers: Mapping[str, int]

    @staticmethod
    def of(source: Checkpoint, sizes: Sizes) -> ByRole:
        """Return the costs for a source."""
        config = source.config
        facts = Facts(
            num_layers=len(config.layer_types),
            num_experts=config.sizes.get("E", 0),
            gqa=config.sizes["NH"] // config.sizes["NKV"],
            tied=source.layout.tied,
            imatrix=sizes.recipe.quantize.imatrix is not None,
        )
        spots = {_spot(item, facts) for unit in sizes.units for item in unit.items}
        return ByRole(facts, Counter(kind for kind, _ in spots))

    def cost(self, unit: Unit, form: str) -> float | None:
        """Return the nats that a unit costs in a form; None: of the form nothing is known."""
        error = self._error(unit, form)
        if error is None:
            return None
        spots = {_spot(item, self.facts) for item in unit.items}
        return NATS * error * sum(self._sensitivity(*spot) for spot in spots)

    def _error(self, unit: Unit, form: str) -> float | None:
        """Return the error of a form; what needs an importance has none without."""
        if self.facts.imatrix and unit.role != EMBED:
            return FORM_ERROR.get(form)
        poor = WEIGHTED_ONLY if self.facts.imatrix else POOR_UNWEIGHTED
        return None if form.upper() in poor else UNWEIGHTED.get(form)

    def _sensitivity(self, kind: str, block: int) -> float:
        whole = sensitivity_of(kind, self.facts, place_of(block, self.facts))
        return whole / self.layers[kind]


def _spot(item: Item, facts: Facts) -> Spot:
    """Return the kind of a weight, as GGUF names it, and its layer."""
    name, _ = gguf_name(item.atom.hub, facts.num_layers)
    tensor = MixTensor(name, item.atom.role, item.atom.shape, (item.atom.name,))
    return tensor.kind, tensor.block
