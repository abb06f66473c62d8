"""What lies beside the weights that are read, or in their stead: adapters, pickles, other files."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn

from formats.errors import FormatError
from formats.safetensors.adapters import ADAPTER_CONFIG, adapter_note, adapters, no_model
from formats.safetensors.index import INDEX, WEIGHTS, indexes
from formats.safetensors.place import Choice, Place, weights_in

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PICKLED = re.compile(r"(pytorch_model.*\.bin|(model|consolidated).*\.(pt|pth|bin))")
GATHERS = "zero_to_fp32.py"  # DeepSpeed saves it beside its shards
GATHER = f"python {GATHERS} . OUT --safe_serialization"
GGUF = ".gguf"


def with_others(place: Place, choice: Choice) -> Choice:
    """Return the choice with what is said of everything beside it."""
    why = "is not in the index; it is not used" if choice.index is not None else "is not used"
    strays = [f"{name} {why}" for name in weights_in(place, but=choice.names)]
    files = adapters(place.names)
    adapter = files or ADAPTER_CONFIG in place.names
    notes = [adapter_note(files, adapter_config(place))] if adapter else []
    if any(name.endswith(WEIGHTS) for name in files):
        strays, notes = [*strays, *notes], []
    others = [name for name in indexes(place.names) if name not in (choice.file, INDEX)]
    pickles = sorted(name for name in place.names if PICKLED.fullmatch(name))
    notes += [f"{', '.join(others)} is not used"] if others else []
    notes += [f"{len(pickles)} pickles ({pickles[0]}) are not used"] if pickles else []
    return replace(choice, strays=(*choice.strays, *strays), notes=(*choice.notes, *notes))


def adapter_config(place: Place) -> dict[str, Any]:
    """Return what adapter_config.json says, nothing if it cannot be read."""
    if ADAPTER_CONFIG in place.names:
        with suppress(FormatError):
            return place.read(ADAPTER_CONFIG)
    return {}


def refuse_no_weights(place: Place) -> NoReturn:
    """Raise FormatError for a folder without a file of weights, and say what it has instead."""
    if ADAPTER_CONFIG in place.names or adapters(place.names):
        raise no_model(place.label, adapter_config(place))
    pickles = sorted(name for name in place.names if name.endswith(PICKLES))
    if pickles:
        raise FormatError(
            f"{place.label}: {pickles[0]} is a pickle, which can run code when it is read; "
            "expected .safetensors",
            fix="save the model again as .safetensors, as save_pretrained() does",
        )
    ggufs = sorted(name for name in place.names if name.endswith(GGUF))
    fix = f"give the GGUF file itself: {place.label}/{ggufs[0]}" if ggufs else ""
    fix = f"gather the shards of ZeRO: {GATHER}" if GATHERS in place.names else fix
    raise FormatError(f"{place.label}: there is no .safetensors file", fix=fix)
