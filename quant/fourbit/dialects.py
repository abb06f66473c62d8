"""How writers of NVFP4 spell it: names of the parts, and which way their scales work.

                        compressed-tensors            ModelOpt
    codes               x.weight_packed               x.weight
    scale of a matrix   x.weight_global_scale [1]     x.weight_scale_2 []
                        448 * 6 / largest weight      largest weight / (448 * 6)
    scale of inputs     x.input_global_scale [1]      x.input_scale []
                        448 * 6 / largest input       largest input / (448 * 6)

Sources: compressed-tensors at 0.20, `generate_gparam`, `calculate_qparams`; ModelOpt at 0.47,
`NVFP4QTensor.quantize` and `convert_hf_quant_config_format`.
"""

from __future__ import annotations

from dataclasses import dataclass

from formats.quant_methods import COMPRESSED, MODELOPT

WEIGHT = "weight"


@dataclass(frozen=True, slots=True)
class Dialect:
    """One way to spell it.

    packed, whole  what follows the weight's name: of its codes, of the scale of its matrix
    inputs         what stands for `weight` in the name of the scale of the inputs
    axes           of a scale of a whole matrix
    multiplies     whether that scale multiplies; else it divides
    zero_scale     the scale of a group of zeros
    """

    name: str
    packed: str
    whole: str
    inputs: str
    axes: int
    multiplies: bool
    zero_scale: float

    def name_inputs(self, weight: str) -> str:
        """Return the name of the scale of a weight's inputs."""
        return weight.removesuffix(WEIGHT) + self.inputs


_ALL = (
    Dialect(
        COMPRESSED,
        packed="_packed",
        whole="_global_scale",
        inputs="input_global_scale",
        axes=1,
        multiplies=False,
        zero_scale=0.125,
    ),
    Dialect(
        MODELOPT,
        packed="",
        whole="_scale_2",
        inputs="input_scale",
        axes=0,
        multiplies=True,
        zero_scale=1.0,
    ),
)
DIALECTS = {one.name: one for one in _ALL}
