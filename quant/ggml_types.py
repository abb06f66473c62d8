"""Every type that a GGUF file may have, as a scheme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from formats.tensor import DTYPE_BYTES
from quant.fourbit.ggml_codes import GgmlCodes
from quant.fourbit.ggml_grids import CODES
from quant.fourbit.ggml_nvfp4 import TYPE, GgmlNvfp4, recognise_nvfp4
from quant.fourbit.ggml_points import GgmlPoints
from quant.fourbit.point_fields import FIELDS
from quant.ggml.scheme import Ggml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from formats.stored import Problem, StoredWeight
    from formats.tensor import TensorInfo


# The key under which a file says how its codes were found, and what it says where GPTQ chose them.
METHOD, FED_BACK = "quantize.calibrate.method", "gptq"


def ggml_type(name: str, *, fed_back: bool = False) -> Ggml:
    """Return the scheme in which a type is written.

    fed_back  whether its codes make up for each other's errors, where it has such
    """
    if name == TYPE:
        return GgmlNvfp4()
    if name in FIELDS:
        return GgmlPoints(name, fed_back=fed_back)
    return GgmlCodes(name, fed_back=fed_back) if name in CODES else Ggml(name)


@dataclass(frozen=True, slots=True)
class GgmlTypes:
    """Recognises every type that a GGUF file may have.

    fed_back  whether the metadata say that codes make up for each other's errors
    """

    fed_back: bool = False

    def recognise(self, infos: Mapping[str, TensorInfo]) -> Iterator[StoredWeight]:
        """Yield every tensor of floats or of ggml's blocks."""
        beside = set()
        weights = []
        for name, info in infos.items():
            form = ggml_type(info.dtype, fed_back=self.fed_back)
            if info.dtype == TYPE:
                weights.append(recognise_nvfp4(name, infos))
                beside |= {part.name for part in weights[-1].parts[1:]}
            elif form.plain or info.dtype not in DTYPE_BYTES:
                weights.append(form.stored(name, info))
        yield from (w for w in weights if w.parts[0].name not in beside)

    def explain(self, _name: str, _infos: Mapping[str, TensorInfo]) -> Problem | None:
        """Return None: what is neither is no weight."""
        return None

    def told(self, block: Mapping[str, Any]) -> GgmlTypes:
        """Return it as it finds weights beside these metadata, by key."""
        return GgmlTypes(self.fed_back or block.get(METHOD) == FED_BACK)
