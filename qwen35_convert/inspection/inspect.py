"""What a checkpoint is, from its headers: sizes, layout, dtypes, problems, how to serve it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from formats.checkpoint import Checkpoint
from formats.family.cache_scales import has_fp8_cache
from formats.family.config_fields import FIELD_NAMES
from formats.tensor import TensorInfo
from qwen35_convert.inspection.serving import Given, Question, how_to_serve


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a checkpoint holds; `as_dict` is what `inspect --json` prints."""

    layout: str
    kind: str
    config: dict[str, Any]
    tensors: int
    parameters: int
    bytes: int
    dtypes: dict[str, int]
    quantization: str | None
    kv_cache: str | None
    mtp: dict[str, Any]
    vision: bool
    problems: list[dict[str, str]]
    notes: list[str]
    serving: dict[str, Any]
    tensor_list: list[TensorInfo]

    def as_dict(self, *, tensors: bool = False) -> dict[str, Any]:
        """Return plain values; with the list of all tensors on request."""
        result = asdict(self)
        listed = result.pop("tensor_list")
        return result | ({"tensor_list": listed} if tensors else {})


def inspect_checkpoint(
    source: Checkpoint, given: Given | None, question: Question | None = None
) -> Inspection:
    """Inspect an opened checkpoint. Only headers are read.

    given     how it was named, for the serving commands; None: it lies nowhere as it is
    question  how many sequences are to be served in how much memory, if that is asked
    """
    layout, infos = source.layout, source.infos()
    scales = {part for atom in layout.atoms.values() for part in atom.parts[1:]}
    scales.update(layout.activation_scales)
    weights = [info for name, info in infos.items() if name not in scales]
    return Inspection(
        layout=layout.kind,
        kind="moe" if source.config.moe else "dense",
        config=_config(source),
        tensors=len(infos),
        parameters=sum(info.numel for info in weights),
        bytes=sum(info.nbytes for info in infos.values()),
        dtypes=dict(sorted(Counter(info.dtype for info in infos.values()).items())),
        quantization=layout.quantized,
        kv_cache="fp8" if has_fp8_cache(source.config) else None,
        mtp={"layers": layout.form.mtp_layers, "experts": _mtp_experts(source)},
        vision=layout.form.vision,
        problems=[asdict(problem) for problem in layout.problems],
        notes=[*source.notes, *layout.notes],
        serving=how_to_serve(source, given, question),
        tensor_list=list(infos.values()),
    )


def _config(source: Checkpoint) -> dict[str, Any]:
    """Return resolved sizes under their names in config.json."""
    config, rope = source.config, source.config.rope
    return {FIELD_NAMES[symbol]: size for symbol, size in config.sizes.items()} | {
        "num_hidden_layers": len(config.layer_types),
        "linear_attention_layers": config.layer_types.count("linear_attention"),
        "full_attention_layers": config.layer_types.count("full_attention"),
        "rope_theta": rope.theta,
        "partial_rotary_factor": rope.partial,
        "mrope_section": list(rope.sections),
        **({"rope_type": rope.kind, **rope.scaling.as_dict()} if rope.scaling else {}),
        "rms_norm_eps": config.eps,
        "tie_word_embeddings": source.layout.tied and not source.layout.headless,
        "mtp_num_hidden_layers": config.mtp_layers,
    }


def _mtp_experts(source: Checkpoint) -> str | None:
    form = source.layout.form
    return form.mtp_experts if source.config.moe and form.mtp_layers else None
