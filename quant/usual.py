"""What most schemes say; the file of a scheme has what it says otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, cast

from formats.quant_methods import COMPRESSED

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from formats.family.ops import Op
    from formats.stored import Problem, Recogniser
    from formats.tensor import TensorInfo
    from quant.choices import Choices
    from quant.measure import Error
    from quant.part import Shape
    from quant.scheme import Prepared, Scheme, StoredRanges


class Usual:
    """What most schemes say; one of them says otherwise by its own method."""

    row_multiple: int = 1
    column_multiple: int = 1
    looked_up: bool = False
    static_inputs: bool = False
    dialects: tuple[str, ...] = (COMPRESSED,)

    @property
    def dialect(self) -> str:
        """Whose names and config it is written with."""
        return COMPRESSED

    @property
    def calibrated(self) -> bool:
        """Return False: no text changes what is stored."""
        return False

    @property
    def together(self) -> bool:
        """Whether a GPU encodes many matrices in one go: those that are calibrated."""
        return self.calibrated

    @property
    def bounded(self) -> bool:
        """Whether `compare` can tell right rows from wrong ones."""
        return True

    def judge(self, error: Error) -> list[str]:
        """Return the faults of its blocks, and of weights by themselves."""
        faults = [f"{n:,} of {error.blocks:,} {what}" for what, n in error.faults.items() if n]
        if error.outside:
            faults.append(f"{error.outside:,} weights are farther off than rounding explains")
        return faults

    def explain(self, _name: str, _infos: Mapping[str, TensorInfo]) -> Problem | None:
        """Return None: no tensor looks like one of these without being one."""
        return None

    def told(self, _block: Mapping[str, Any]) -> Recogniser:
        """Return itself: headers show all."""
        return cast("Recogniser", self)

    def traits(self, _columns: int) -> frozenset[str]:
        """Return nothing: its label says all."""
        return frozenset()

    def refuses(self, _shape: Shape) -> str | None:
        """Return None: engines take any shape."""
        return None

    def prepare(self, _values: Iterator[Tensor]) -> Prepared:
        """Return None: rows are encoded by themselves."""
        return None

    def carries(self, _form: Scheme, _late: Sequence[Op]) -> bool:
        """Return False: values are encoded."""
        return False

    def carry(
        self, form: Scheme, rows: Mapping[str, Tensor], late: Sequence[Op]
    ) -> dict[str, Tensor]:
        """Nobody asks."""
        raise NotImplementedError

    def scale_inputs(self, _amax: Tensor) -> dict[str, Tensor]:
        """Return nothing: inputs are what they are."""
        return {}

    def defects(self, _rows: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
        """Return nothing: all bytes have a meaning."""
        return {}

    def check_scales(self, _shared: Mapping[str, Tensor], _ranges: StoredRanges) -> None:
        """Take any: it has no scales, or all have a meaning."""

    @property
    def flushes(self) -> bool:
        """Return False: engines take scales as they are."""
        return False

    def peak(self, _rows: Mapping[str, Tensor]) -> float:
        """Nobody asks."""
        raise NotImplementedError

    def flush(
        self, rows: Mapping[str, Tensor], _peak: float | None
    ) -> tuple[Mapping[str, Tensor], int]:
        """Return rows as they are."""
        return rows, 0

    def config_entry(self, _modules: Sequence[str]) -> dict[str, Any] | None:
        """Return None: compressed-tensors does not know it."""
        return None

    def config_block(self, _kept: Sequence[str]) -> dict[str, Any] | None:
        """Return None: it has no config of its own."""
        return None

    def with_choices(self, _choices: Choices) -> Self:
        """Return itself: it has nothing to choose."""
        return self

    def in_dialect(self, _dialect: str) -> Self:
        """Return itself: it is stored in one way."""
        return self

    def beside_others(self) -> Self:
        """Return itself: it is stored in one way."""
        return self
