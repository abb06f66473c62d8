"""Every type that a GGUF file may have, as a scheme."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from formats.tensor import DTYPE_BYTES
from quant.fourbit.ggml_nvfp4 import TYPE, GgmlNvfp4, recognise_nvfp4
from quant.ggml.scheme import Ggml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from formats.stored import Problem, StoredWeight
    from formats.tensor import TensorInfo


def ggml_type(name: str) -> Ggml:
    """Return the scheme in which a type is written."""
    return GgmlNvfp4() if name == TYPE else Ggml(name)


class GgmlTypes:
    """Recognises every type that a GGUF file may have."""

    def recognise(self, infos: Mapping[str, TensorInfo]) -> Iterator[StoredWeight]:
        """Yield every tensor of floats or of ggml's blocks."""
        beside = set()
        weights = []
        for name, info in infos.items():
            form = Ggml(info.dtype)
            if info.dtype == TYPE:
                weights.append(recognise_nvfp4(name, infos))
                beside |= {part.name for part in weights[-1].parts[1:]}
            elif form.plain or info.dtype not in DTYPE_BYTES:
                weights.append(form.stored(name, info))
        yield from (w for w in weights if w.parts[0].name not in beside)

    def explain(self, _name: str, _infos: Mapping[str, TensorInfo]) -> Problem | None:
        """Return None: what is neither is no weight."""
        return None

    def told(self, _block: Mapping[str, Any]) -> GgmlTypes:
        """Return itself: every tensor says its type."""
        return self
