"""Faults in folders of GPTQ's dialect: its rules and fields, and what they say of packed words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.planted.fault import UNOPENED, Fault, in_outputs
from tests.planted.quantization_faults import Change, block_fault, put

OUTPUT = in_outputs("gptq")


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for name, (wanted, change) in CONFIG.items():
        yield block_fault(f"gptq-{name}", wanted, change, OUTPUT, codes=UNOPENED)


def _without(word: str) -> Change:
    """Return a change that loses the rules that name this."""

    def change(block: dict[str, Any]) -> None:
        lost = [rule for rule in block["dynamic"] if word in rule]
        assert lost, f"no rule names {word}"
        for rule in lost:
            del block["dynamic"][rule]

    return change


def _leave(pattern: str) -> Change:
    return lambda block: block["dynamic"].update({f"-:{pattern}": {}})


CONFIG: dict[str, tuple[str, Change]] = {
    "rules-lost": ("self_attn.o_proj dynamic", put("dynamic", {})),
    "rules-missing": ("self_attn.o_proj dynamic", lambda block: block.pop("dynamic")),
    "a-rule-lost": ("self_attn.o_proj dynamic", _without("o_proj")),
    "a-rule-too-many": ("down_proj dynamic", _leave(".*down_proj")),
    "bits-8": ("bits", put("bits", 8)),
    "group-64": ("groups", put("group_size", 64)),
    "sym-false-and-v2": ("checkpoint_format|zero", put("checkpoint_format", "gptq_v2")),
    "head-quantised": ("lm_head", put("lm_head", True)),
    "words-of-64-bits": ("pack_dtype", put("pack_dtype", "int64")),
    "inside-names-one": ("modules_in_block_to_quantize",
                         put("modules_in_block_to_quantize", [["self_attn.q_proj"]])),
    "method-awq": ("awq", put("quant_method", "awq")),
}  # fmt: skip
