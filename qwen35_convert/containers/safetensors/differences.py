"""How a folder differs from what its source gives: headers by tensor, config.json by field.

With the recipe at hand everything is expected to the byte, and compared there. Without it, an
artifact of another tool is right if what engines obey is the source's: the same sizes, layers, rope
and epsilon. Fields that only record where a file came from may be others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from formats.checkpoint import Checkpoint
from formats.safetensors.folder import CONFIG
from qwen35_convert.difference import ABSENT, differences, first, near
from qwen35_convert.failure import Failure

# Of config.json, what other checks judge by the tensors, or what no engine obeys.
JUDGED_ELSEWHERE = frozenset(
    {"architectures", "model_type", "quantization_config", "quantization", "tie_word_embeddings"}
    | {"mtp_num_hidden_layers", "full_attention_interval"}
)
RECORDS = frozenset(
    {"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache", "auto_map"}
    | {"language_model_only", "return_dict", "output_attentions", "output_hidden_states"}
)
# Absent fields that mean the same as these values.
NEUTRAL: tuple[Any, ...] = (None, False, 0, 0.0, [], {}, "")


def header_differences(path: Path, expected: bytes) -> Iterator[str]:
    """Yield how the header of a safetensors file differs from the expected one."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        got, wanted = json.loads(file.read(length)), json.loads(expected[8:])
    for tensors in (got, wanted):
        for entry in tensors.values():
            entry.pop("data_offsets", None)
    sentences = list(first(differences(got, wanted)))
    yield from sentences or ["has its tensors in another order than the recipe writes them"]


def config_differences(artifact: Checkpoint, source: Checkpoint) -> Iterator[Failure]:
    """Yield what engines obey in config.json, and is not the source's."""
    for sentence in _resolved(artifact, source):
        yield Failure(CONFIG, sentence)
    for sentence in _stated(artifact.config.text, source.config.text):
        yield Failure(CONFIG, sentence)


def _resolved(artifact: Checkpoint, source: Checkpoint) -> Iterator[str]:
    """Compare what the fields come to, defaults included."""
    ours, theirs = artifact.config, source.config
    text = {symbol: size for symbol, size in theirs.sizes.items() if not symbol.startswith("v")}
    for symbol, size in text.items():
        if ours.sizes.get(symbol) != size:
            yield f"{theirs.fields[symbol]} is {ours.sizes.get(symbol)}, expected {size}"
    pairs = {
        "layer_types": (list(ours.layer_types), list(theirs.layer_types)),
        "rope_parameters.rope_theta": (ours.rope.theta, theirs.rope.theta),
        "rope_parameters.partial_rotary_factor": (ours.rope.partial, theirs.rope.partial),
        "rope_parameters.mrope_section": (list(ours.rope.sections), list(theirs.rope.sections)),
        "rms_norm_eps": (ours.eps, theirs.eps),
    }
    for field, (got, expected) in pairs.items():
        yield from first(differences(got, expected, field, near))


def _stated(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """Compare the fields that both state, and those that only the artifact does."""
    for key in dict.fromkeys((*theirs, *ours)):
        if key in JUDGED_ELSEWHERE | RECORDS | {"rope_parameters", "layer_types"}:
            continue
        got, expected = ours.get(key, ABSENT), theirs.get(key, ABSENT)
        if got is ABSENT or (expected is ABSENT and got in NEUTRAL):
            continue
        if expected is ABSENT and key not in OBEYED:
            continue
        yield from first(differences(got, expected, key, near))


# Fields that change what is computed, or when a text ends; an artifact may not add one.
OBEYED = frozenset(
    {"rope_scaling", "rope_theta", "partial_rotary_factor", "sliding_window", "attn_output_gate"}
    | {"hidden_act", "attention_bias", "norm_topk_prob", "output_gate_type", "eos_token_id"}
    | {
        "decoder_sparse_step",
        "mlp_only_layers",
        "rms_norm_eps",
        "head_dim",
        "linear_conv_kernel_dim",
    }
    | {"attention_dropout", "logit_scale", "final_logit_softcapping", "is_causal"}
)
