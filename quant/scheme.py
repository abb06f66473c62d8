"""What a scheme is: one stored form of a weight, and all that is known of it.

Before a byte is read it says which tensors it stores (`parts`), recognises them in a checkpoint,
and refuses shapes that no engine takes. Then rows are encoded, decoded and compared. Everybody who
meets a stored weight asks its scheme; `quant.registry` lists them. Importing this module imports no
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from formats.stored import Recogniser, StoredForm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from formats.family.ops import Op
    from quant.choices import Choices
    from quant.measure import Error
    from quant.part import Cost, Part, Shape

    StoredRanges = Iterator[tuple[int, Mapping[str, Tensor]]]

# What `prepare` found out about whole weights, for `encode`.
Prepared = Any
# A `quant.fourbit.hessian.Factor`, for schemes that are calibrated.
Factor = Any


class Scheme(StoredForm, Recogniser, Protocol):
    """How one weight is stored. Weights are [N, K] or, stacked, [E, N, K]."""

    @property
    def row_multiple(self) -> int:
        """Rows may be encoded in ranges that start at a multiple of this."""
        ...

    @property
    def column_multiple(self) -> int:
        """GPTQ chooses the codes of so many columns together."""
        ...

    @property
    def looked_up(self) -> bool:
        """Whether engines read an embedding that is stored so."""
        ...

    @property
    def static_inputs(self) -> bool:
        """Whether a scale of the weight's inputs is stored with it."""
        ...

    @property
    def dialect(self) -> str:
        """Whose names and config it is written with."""
        ...

    @property
    def dialects(self) -> tuple[str, ...]:
        """Whose names and configs it can be written with."""
        ...

    @property
    def calibrated(self) -> bool:
        """Whether `encode` takes the importance of a text's inputs, and their Hessian's factor."""
        ...

    @property
    def together(self) -> bool:
        """Whether `encode` takes `quant.fourbit.batched.Factors` of many matrices, on a GPU."""
        ...

    def parts(self, name: str, shape: Shape) -> tuple[Part, ...]:
        """Return the stored tensors of a weight of this name; the first has the weight's rows."""
        ...

    def refuses(self, shape: Shape) -> str | None:
        """Return why engines cannot take this shape, or None."""
        ...

    def prepare(self, values: Iterator[Tensor]) -> Prepared:
        """Return what must be known of whole weights before their rows are encoded.

        values  rows [n, K] of every weight of one fused matrix, one after another; a scheme that
                needs nothing returns None and reads nothing
        """
        ...

    def encode(
        self,
        w_NK: Tensor,
        prepared: Prepared = None,
        importance: Tensor | None = None,
        out: Tensor | None = None,
        factor: Factor | None = None,
    ) -> dict[str, Tensor]:
        """Return the parts of rows by key; one that all rows share comes with every range.

        w_NK        [N, K] bfloat16, float16 or float32, contiguous or not
        importance  what an error of each column weighs, float32 [K], for the types that search
        factor      of the inputs' Hessian, for a `calibrated` scheme: codes are chosen by GPTQ
        out         if given, where the first part goes: used memory is faster than fresh memory

        Raises QuantError if the weight holds a NaN or an infinity.
        """
        ...

    def carries(self, form: Scheme, late: Sequence[Op]) -> bool:
        """Whether what another form stores is taken as it is, without rounding.

        late  what is to be done to the columns of each row
        """
        ...

    def carry(
        self, form: Scheme, rows: Mapping[str, Tensor], late: Sequence[Op]
    ) -> dict[str, Tensor]:
        """Return the parts, as `encode` does, of rows as the other form's `decode` takes them.

        QuantError if it holds what this form cannot.
        """
        ...

    def scale_inputs(self, amax: Tensor) -> dict[str, Tensor]:
        """Return the parts that are measured, by key; amax is the largest input, float32 []."""
        ...

    def decode(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the values of n rows, [n, K]: float32, or the type of what is stored plainly.

        rows  by key: what each of the n rows has of a part, [n, ...]; a part that all share, whole
        """
        ...

    def compare(
        self,
        w_NK: Tensor,
        rows: Mapping[str, Tensor],
        importance: Tensor | None = None,
        *,
        weighed: bool = False,
    ) -> Error:
        """Return how far rows, as for `decode`, are from the weight, and what is wrong with them.

        importance  what they were encoded with
        weighed     they were encoded with an importance that is not known
        """
        ...

    def measure(self, w_NK: Tensor, rows: Mapping[str, Tensor]) -> Error:
        """Return how far rows, as for `decode`, are from the weight; nothing is judged."""
        ...

    @property
    def bounded(self) -> bool:
        """Whether `compare` can tell right rows from wrong ones; if not, they stay unproven."""
        ...

    def judge(self, error: Error) -> list[str]:
        """Return what is wrong with a whole weight whose rows add up to this error.

        Each is the end of a sentence whose subject is the weight.
        """
        ...

    def defects(self, rows: Mapping[str, Tensor]) -> dict[str, tuple[str, int]]:
        """Return what rows show to be wrong without a source: by key, the defect and its count."""
        ...

    def check_scales(self, shared: Mapping[str, Tensor], ranges: StoredRanges) -> None:
        """Refuse scales of a source that cannot be right. QuantError.

        One of 0 erases its codes, one below 0 turns them around.

        shared  the parts that rows share, by key, whole
        ranges  the first row, and rows as for `decode`, of one range after another; read as taken
        """
        ...

    @property
    def flushes(self) -> bool:
        """Whether an engine takes small scales of groups for 0."""
        ...

    def peak(self, rows: Mapping[str, Tensor]) -> float:
        """Return the largest scale of rows."""
        ...

    def flush(
        self, rows: Mapping[str, Tensor], peak: float | None
    ) -> tuple[Mapping[str, Tensor], int]:
        """Return rows as that engine has them, and how many groups it takes for 0.

        peak  the largest scale of all weights that one kernel multiplies; None: as large as can be
        """
        ...

    def cost(self, *, moved: bool) -> Cost:
        """Return what a weight costs; moved: its rows are gathered, or changed after decoding."""
        ...

    def config_entry(self, modules: Sequence[str]) -> dict[str, Any] | None:
        """Return the group of compressed-tensors' `config_groups` for these modules.

        None if such a config knows no weights of this form.
        """
        ...

    def config_block(self, kept: Sequence[str]) -> dict[str, Any] | None:
        """Return a `quantization_config` of its own, for an artifact that has no other scheme.

        kept  full names of the modules that are not quantised

        None if the form is described by compressed-tensors.
        """
        ...

    def with_choices(self, choices: Choices) -> Scheme:
        """Return it as it was chosen, itself if it has nothing to choose. QuantError."""
        ...

    def in_dialect(self, dialect: str) -> Scheme:
        """Return it as it is stored in a dialect; itself if that has no other form for it."""
        ...

    def beside_others(self) -> Scheme:
        """Return it as it is stored in an artifact that has other schemes too."""
        ...
