"""adapter_config.json: the rank and the scale of each module, and what cannot be merged, by name.

    scale = alpha / r        use_rslora: alpha / sqrt(r)

`rank_pattern` and `alpha_pattern` are regular expressions for the end of a module's name in the
model as it was trained; the first that matches counts.

Source: peft 0.21.2, `LoraConfig`, `LoraModel._create_and_replace`, `get_pattern_key`. A linear
layer of the family is an nn.Linear, for which peft itself ignores `fan_in_fan_out`.
Trap: pissa, olora, corda, loftq and lora_ga change the base model before training; what they save
is a difference from that model, which nobody has kept.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from formats.adapter.names import PEFT_MERGE
from formats.errors import FormatError
from formats.json_file import read_object
from formats.safetensors.adapters import ADAPTER_CONFIG

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")

LORA = "LORA"
# Fields that make another function of the same tensors, or of the model.
VARIANTS = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "alora_invocation_tokens": "aLoRA, which acts on some tokens only",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "layer_replication": "layer replication",
    "monteclora_config": "MonteCLoRA",
    "trainable_token_indices": "trainable tokens",
    "velora_config": "VeLoRA",
}
# How weights may have been initialised without a change of the base model.
HARMLESS_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
MAX_PATTERN = 200


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What an adapter_config.json says, checked.

    ranks, alphas  of modules whose names end like this
    saved          modules that were trained whole
    parameters     parameters that were trained as such, not as modules: fused experts
    tied           whether the head was trained as the embedding's twin
    base           the model that it was trained on; None: not told
    version        of peft; None: not told
    """

    r: int
    alpha: float
    rslora: bool = False
    ranks: Mapping[str, int] | None = None
    alphas: Mapping[str, float] | None = None
    saved: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    tied: bool = False
    base: str | None = None
    version: str | None = None

    def rank(self, module: str) -> int:
        """Return the rank of a module, by its name in the model that was trained."""
        return _matching(self.ranks, module, self.r)

    def scale(self, module: str) -> float:
        """Return what the product of a module's factors is multiplied with."""
        alpha, r = _matching(self.alphas, module, self.alpha), self.rank(module)
        return alpha / math.sqrt(r) if self.rslora else alpha / r


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Return what the config of an adapter says. FormatError if it is none that can be merged."""
    raw = read_object(folder / ADAPTER_CONFIG)
    try:
        _refuse_others(raw)
        return _parse(raw)
    except FormatError as error:
        raise FormatError(
            f"{ADAPTER_CONFIG}: {error.subject}", error.got, error.expected, error.fix
        ) from None


def _refuse_others(raw: Mapping[str, Any]) -> None:
    kind = raw.get("peft_type")
    if kind != LORA:
        got = "is missing" if kind is None else f"is {kind!r:.60}"
        raise FormatError("peft_type", got, repr(LORA), PEFT_MERGE)
    for field, name in VARIANTS.items():
        if raw.get(field):
            raise FormatError(field, f"is set: {name}", "plain LoRA", PEFT_MERGE)
    init = raw.get("init_lora_weights", True)
    if not any(init is one or init == one for one in HARMLESS_INITS):
        raise FormatError(
            "init_lora_weights",
            f"is {init!r:.60}, which changed the base model before training",
            "an adapter of the base model as it is",
            "save it with peft's path_initial_model_for_weight_conversion",
        )


def _parse(raw: Mapping[str, Any]) -> AdapterConfig:
    base, version = raw.get("base_model_name_or_path"), raw.get("peft_version")
    return AdapterConfig(
        r=_rank("r", raw.get("r", 8)),
        alpha=_alpha("lora_alpha", raw.get("lora_alpha", 8)),
        rslora=bool(raw.get("use_rslora")),  # as peft asks
        ranks={key: _rank(key, value) for key, value in _patterns(raw, "rank_pattern")},
        alphas={key: _alpha(key, value) for key, value in _patterns(raw, "alpha_pattern")},
        saved=_names(raw, "modules_to_save"),
        parameters=_names(raw, "target_parameters"),
        tied=raw.get("ensure_weight_tying") is True,
        base=base if isinstance(base, str) and base.isprintable() and base else None,
        version=version if isinstance(version, str) else None,
    )


def _patterns(raw: Mapping[str, Any], field: str) -> list[tuple[str, Any]]:
    patterns = raw.get(field) or {}
    if not isinstance(patterns, dict):
        raise FormatError(field, f"is {patterns!r:.60}", "an object")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise FormatError(f"{field}: {pattern!r:.60}", str(error), "a pattern") from None
        if len(pattern) > MAX_PATTERN:
            got = f"is a pattern of {len(pattern)} characters"
            raise FormatError(field, got, f"at most {MAX_PATTERN}")
    return [*patterns.items()]


def _names(raw: Mapping[str, Any], field: str) -> tuple[str, ...]:
    names = raw.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FormatError(field, f"is {names!r:.60}", "a list of names")
    return tuple(names)


def _rank(field: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise FormatError(field, f"is {value!r:.60}", "a rank of 1 or more")
    return value


def _alpha(field: str, value: object) -> float:
    if type(value) not in (int, float):
        raise FormatError(field, f"is {value!r:.60}", "a number")
    return float(value)  # type: ignore[arg-type]


def _matching(patterns: Mapping[str, T] | None, module: str, default: T) -> T:
    """Return the value of the first pattern that the end of a name matches, as peft does."""
    values = (value for key, value in (patterns or {}).items() if _ends(key, module))
    return next(values, default)


def _ends(pattern: str, module: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", module) is not None
