"""Faults in `quantization_config`: codes that an engine would read by another rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.planted.artifact import Artifact, Base
from tests.planted.config_faults import CONFIG
from tests.planted.fault import FORGED, STRUCTURE, UNOPENED, Fault, Where, in_bases, in_outputs

BLOCK = "quantization_config"
Change = Callable[[dict[str, Any]], object]
OFFICIAL = in_bases("nano-fp8-block", "moe-fp8-block", "nano-fp8-block-hub")
COMPRESSED = in_bases("wide-fp8-channel", "moe-fp8-channel", "wide-mixed")


def cases() -> Iterator[Fault]:
    """Yield every fault of this kind."""
    for table, where in ((FP8, OFFICIAL), (LISTS, _every)):
        for name, (wanted, change) in table.items():
            yield block_fault(name, wanted, change, where)
    for table, where in ((FP8_REFUSED, OFFICIAL), (REFUSED, _every)):
        for name, (wanted, change) in table.items():
            yield block_fault(name, wanted, change, where, codes=UNOPENED)
    for name, (wanted, change) in ONLY_BY_RECEIPT.items():
        yield block_fault(name, wanted, change, _every, receipts=(FORGED,))
    yield Fault("quantization", "missing", _drop, _every, STRUCTURE)
    yield Fault(
        "quantization", "in-text-config-too", _twice, in_outputs("fp8-block-hub"), STRUCTURE
    )
    yield Fault("quantization", "of-nothing", _invent, in_outputs("bf16-split"), STRUCTURE)


def _every(base: Base) -> bool:
    """Whether something is quantised in this base."""
    return OFFICIAL(base) or COMPRESSED(base)


def block_fault(name: str, wanted: str, change: Change, where: Where, **more: Any) -> Fault:
    """Return a fault of this kind, of which all words must be named."""

    def plant(artifact: Artifact) -> tuple[str, ...]:
        with artifact.json(CONFIG) as config:
            change(config[BLOCK])
        return tuple(wanted.split(" "))

    return Fault("quantization", name, plant, where, STRUCTURE, **more)


def _drop(artifact: Artifact) -> str:
    with artifact.json(CONFIG) as config:
        del config[BLOCK]
    return BLOCK


def _twice(artifact: Artifact) -> str:
    """Let the text part say another thing than the root: loaders differ in which they read."""
    with artifact.json(CONFIG) as config:
        config["text_config"][BLOCK] = config[BLOCK] | {"activation_scheme": "static"}
    return "activation_scheme|quantization_config"


def _invent(artifact: Artifact) -> str:
    with artifact.json(CONFIG) as config:
        config[BLOCK] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return BLOCK


def put(field: str, value: Any) -> Change:
    """Return a change of one field."""
    return lambda block: block.update({field: value})


def entries(block: dict[str, Any]) -> list[Any]:
    """Return the list of modules that are not quantised."""
    found: list[Any] = block.get("modules_to_not_convert", block.get("ignore"))
    return found


def _without(ending: str) -> Change:
    """Return a change that takes the modules of this name from the list."""

    def change(block: dict[str, Any]) -> None:
        kept = [entry for entry in entries(block) if not entry.endswith(ending)]
        assert len(kept) < len(entries(block)), f"{ending} is not in the list"
        entries(block)[:] = kept

    return change


def _with(*endings: str) -> Change:
    """Return a change that lists quantised modules."""

    def change(block: dict[str, Any]) -> None:
        listed = (entry for entry in entries(block) if entry.endswith("embed_tokens"))
        prefix = next(listed).removesuffix("embed_tokens")
        entries(block).extend(prefix + ending for ending in endings)

    return change


def _prefix(block: dict[str, Any]) -> None:
    """Write the list in the other namespace."""
    hub, text = "model.language_model.", "model."
    nested = any(entry.startswith(hub) for entry in entries(block))
    old, new = (hub, text) if nested else (text, hub)
    entries(block)[:] = [
        new + e.removeprefix(old) if e.startswith(old) else e for e in entries(block)
    ]


def _rename_list(block: dict[str, Any]) -> None:
    """Keep the list where transformers does not look once there is another, empty or not."""
    block["ignored_layers"] = block["modules_to_not_convert"]
    block["modules_to_not_convert"] = []


# name: (what must be named, change)
FP8: dict[str, tuple[str, Change]] = {
    "activations-static": ("activation_scheme", put("activation_scheme", "static")),
    "activations-null": ("activation_scheme", put("activation_scheme", None)),
    "format-e5m2": ("fmt", put("fmt", "e5m2")),
    "block-size-missing": ("weight_block_size", lambda block: block.pop("weight_block_size")),
    "scales-in-ue8m0": ("scale_fmt", put("scale_fmt", "ue8m0_packed")),
    "dequantize": ("dequantize", put("dequantize", True)),
    "more-modules-converted": ("modules_to_convert", put("modules_to_convert", ["lm_head"])),
    "experts-in-fp4": ("expert_dtype", put("expert_dtype", "fp4")),
    "kv-cache-of-modelopt": ("kv_cache_quant_algo", put("kv_cache_quant_algo", "FP8")),
    "scale-format-of-nobody": ("scale_fmt", put("scale_fmt", "e5m3")),
    "another-second-list": ("in_proj_a", put("ignored_layers", ["lm_head"])),
    "an-empty-first-list": ("in_proj_a", _rename_list),
    "list-of-compressed-tensors": ("ignore", put("ignore", ["lm_head"])),
}
FP8_REFUSED: dict[str, tuple[str, Change]] = {
    "block-size-64": ("weight_block_size", put("weight_block_size", [64, 64])),
    "block-size-1": ("weight_block_size", put("weight_block_size", [1, 128])),
    "method-compressed-tensors": (
        "quant_method|weight_scale|config_groups",
        put("quant_method", "compressed-tensors"),
    ),
}
REFUSED: dict[str, tuple[str, Change]] = {
    "method-awq": ("awq", put("quant_method", "awq")),
    "method-missing": ("quant_method|unnamed", lambda block: block.pop("quant_method")),
}
LISTS: dict[str, tuple[str, Change]] = {
    "list-without-in-proj-b": ("in_proj_b", _without("0.linear_attn.in_proj_b")),
    "list-without-mtp-fc": ("mtp.fc", _without("mtp.fc")),
    "list-of-a-quantised-module": (
        "layers.0.linear_attn.out_proj",
        _with("layers.0.linear_attn.out_proj"),
    ),
    "list-of-a-quantised-layer": ("layers.1.self_attn|layers.1.linear_attn", _with("layers.1")),
    "list-of-what-is-not-there": ("layers.9.self_attn.q_proj", _with("layers.9.self_attn.q_proj")),
    "list-of-everything": ("in_proj_qkv", lambda block: entries(block).append("re:.*")),
    "list-in-the-wrong-namespace": ("in_proj_a", _prefix),
    "list-of-numbers": ("[0] 5", lambda block: entries(block).insert(0, 5)),
    "list-of-a-broken-pattern": ("re:.*(", lambda block: entries(block).append("re:.*(")),
    "list-lost": (
        "in_proj_a",
        lambda block: [block.pop(k, None) for k in ("modules_to_not_convert", "ignore")],
    ),
    "load-in-4-bits": ("load_in_4bit", put("load_in_4bit", True)),
    "list-empty": ("in_proj_a", lambda block: entries(block).clear()),
}
# Other tools write these differently, and right.
ONLY_BY_RECEIPT: dict[str, tuple[str, Change]] = {
    "a-comment-added": ("producer", put("producer", {"name": "x"})),
    "list-without-conv1d": ("conv1d", _without("conv1d")),
    "list-without-embedding": ("embed_tokens", _without("embed_tokens")),
    "list-without-head": ("lm_head", _without("lm_head")),
    "list-sorted": ("modules_to_not_convert|ignore", lambda block: entries(block).reverse()),
}
