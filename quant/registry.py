"""Every scheme by its name: those that recipes may ask for, and those that a checkpoint may hold.

A scheme is one file and one row here. `SCHEMES` maps a name to the scheme that is written;
`RECOGNISERS` are asked in turn what a folder's tensors are, the plain ones last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from formats.nearest import nearest, one_of
from formats.quant_methods import GPTQ
from formats.stored import KEEP
from quant.choices import USUAL
from quant.errors import QuantError
from quant.fourbit.int4 import INT4
from quant.fourbit.int8 import INT8
from quant.fourbit.mxfp4 import MXFP4
from quant.fourbit.nvfp4 import NVFP4, NVFP4_INPUTS
from quant.fourbit.qweight import GPTQ_WRITTEN
from quant.fourbit.qweights import QWEIGHTS
from quant.fp8.scheme import BLOCKS, CHANNELS, FORMS
from quant.ggml_types import GgmlTypes
from quant.plain import Plain

if TYPE_CHECKING:
    from collections.abc import Iterable

    from formats.stored import Recogniser
    from quant.choices import Choices
    from quant.scheme import Scheme

SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme for scheme in (BLOCKS, CHANNELS, NVFP4, NVFP4_INPUTS, MXFP4, INT4, INT8)
}
# What a scheme is in a dialect that has another layout for it.
OTHER_FORMS: dict[tuple[str, str], Scheme] = {(INT4.name, GPTQ): GPTQ_WRITTEN}
NVFP4_FORMS = (NVFP4_INPUTS, NVFP4)
RECOGNISERS: list[Recogniser] = [*FORMS, *NVFP4_FORMS, MXFP4, INT4, INT8, QWEIGHTS, Plain()]
GGUF_RECOGNISERS: list[Recogniser] = [GgmlTypes()]


def register(scheme: Scheme) -> None:
    """Add a scheme: recipes may name it, and folders may hold it."""
    SCHEMES[scheme.name] = scheme
    RECOGNISERS.insert(0, scheme)


def get_scheme(name: str, choices: Choices = USUAL) -> Scheme:
    """Return the scheme of that name, as it was chosen.

    Raises QuantError for a name or a choice that is not known.
    """
    if name not in SCHEMES:
        raise unknown("scheme", name, [*SCHEMES, KEEP])
    scheme = OTHER_FORMS.get((name, choices.dialect), SCHEMES[name])
    if choices.dialect not in scheme.dialects:
        other = [known for known, dialect in OTHER_FORMS if dialect == choices.dialect]
        able = other + [one.name for one in SCHEMES.values() if choices.dialect in one.dialects]
        raise QuantError(
            f"{name} cannot be written in the dialect {choices.dialect},\n"
            f"  expected {one_of([*able, KEEP])}, or the dialect {scheme.dialects[0]}"
        )
    return scheme.with_choices(choices)


def get_schemes(
    names: Iterable[str], choices: Choices = USUAL, *, alone: bool = True
) -> dict[str, Scheme]:
    """Return schemes that stand in one artifact.

    alone  whether one by itself may have a config of its own
    """
    schemes = {name: get_scheme(name, choices) for name in names}
    alone = alone and len(schemes) == 1
    return {n: scheme if alone else scheme.beside_others() for n, scheme in schemes.items()}


def unknown(what: str, got: str, known: Iterable[str]) -> QuantError:
    """Return the error for a name that is not known, with the nearest that is, or with all."""
    names = list(known)
    near = nearest(got, names)
    hint = f"did you mean {near!r}?" if near else f"expected {one_of(names)}"
    return QuantError(f"{what} {got!r} is not known, {hint}")
