"""Packed words of compressed-tensors, of four bits or of eight: headers do not tell them apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from formats.family.packings import promised
from quant.fourbit.targets import bits_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from formats.stored import Problem, Recogniser, StoredWeight
    from formats.tensor import TensorInfo


@dataclass(frozen=True, slots=True)
class PackedWords:
    """Finds packed words, of which headers do not show whether they hold eight codes or four.

    form   of four bits
    wide   of eight
    block  config.json's quantization_config, which says it
    """

    form: Recogniser
    wide: Recogniser
    block: Mapping[str, Any]

    def recognise(self, infos: Mapping[str, TensorInfo]) -> Iterator[StoredWeight]:
        """Yield words of four bits, and words of eight bits."""
        wide = {n for n, info in infos.items() if self._is_wide(info.name)} if self.block else set()
        yield from self.form.recognise({n: infos[n] for n in infos if n not in wide})
        yield from self.wide.recognise({n: infos[n] for n in infos if n in wide})

    def explain(self, name: str, infos: Mapping[str, TensorInfo]) -> Problem | None:
        """Return what its form says."""
        return self.form.explain(name, infos)

    def told(self, block: Mapping[str, Any]) -> Recogniser:
        """Return it with another block."""
        return replace(self, block=block)

    def _is_wide(self, stored: str) -> bool:
        module, weight, _ = stored.rpartition(".weight")
        bits = bits_of(module, self.block) or promised(module, self.block).get("bits")
        return bool(weight) and bits == 8
