"""What llama.cpp makes of a key: obeys it, takes a default where it is absent, or never reads it.

Tables only; `{arch}` is the architecture's prefix. A key that is in none of them is one that some
engine may obey, so a comparison that meets it on one side alone fails.

Source: llama.cpp's `src/llama-model.cpp`, `src/llama-vocab.cpp`, `common/common.h` and
`tools/mtmd/clip.cpp`; kinds, and what is right beside them, were tried in its build 11549. Traps: a
key of another kind of number is refused, an integer of 64 bits as well, but of some arrays two
kinds are read; zeros among the heads of each block leave no heads at all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

from formats.family.config_fields import DEFAULT_INTERVAL
from formats.gguf.metadata import ABOUT

T = TypeVar("T")

# What says where a file came from. The alignment is held against the offsets as a file is opened,
# the file type against the types, the split against the names of the parts.
RECORDS = frozenset(
    {f"general.{key}" for key in ABOUT}
    | {"general.alignment", "general.file_type", "general.datasets"}
    # of a byte-level BPE, which is merged by rank, no scores are read
    | {"tokenizer.ggml.scores"}
)
# Of these, what llama.cpp reads to show it, and refuses a file for that has another kind.
RECORD_KINDS = {"general.name": "string"}
RECORD_FAMILIES = re.compile(r"general\.(base_model|dataset|source)\..+")
# Namespaces that engines read, beside those of architectures; a tool's own is that tool's record.
READ = frozenset({"general", "tokenizer", "clip", "adapter", "diffusion", "xielu"})
SAMPLING = "general.sampling."

# Values that do what the absence of the key does.
ABSENT_IN_TEXT: dict[str, tuple[Any, ...]] = {
    "general.type": ("model",),
    "general.sampling.top_k": (40,),
    "general.sampling.top_p": (0.95,),
    "general.sampling.min_p": (0.05,),
    "general.sampling.xtc_probability": (0.0,),
    "general.sampling.xtc_threshold": (0.1,),
    "general.sampling.temp": (0.8,),
    "general.sampling.penalty_last_n": (64,),
    "general.sampling.penalty_repeat": (1.0,),
    "general.sampling.mirostat": (0,),
    "general.sampling.mirostat_tau": (5.0,),
    "general.sampling.mirostat_eta": (0.1,),
    "{arch}.full_attention_interval": (DEFAULT_INTERVAL,),
    "{arch}.nextn_predict_layers": (0,),
    "{arch}.rope.scaling.type": ("none", "linear"),  # by the factor, which is 1 if absent
    "{arch}.rope.scaling.factor": (1.0, 0.0),
    "{arch}.rope.scaling.attn_factor": (1.0,),
    "{arch}.rope.scaling.finetuned": (False,),
    "{arch}.rope.scale_linear": (1.0, 0.0),
    "{arch}.attention.causal": (True,),
    "{arch}.attention.scale": (0.0,),
    "{arch}.attention.clamp_kqv": (0.0,),
    "{arch}.attention.sliding_window": (0,),
    "{arch}.pooling_type": (0,),
    "{arch}.logit_scale": (0.0, 1.0),
    "{arch}.attn_logit_softcapping": (0.0,),
    "{arch}.final_logit_softcapping": (0.0,),
    "{arch}.leading_dense_block_count": (0,),
    "{arch}.expert_count": (0,),
    "{arch}.expert_used_count": (0,),
    "{arch}.expert_gating_func": (1,),  # softmax
    "{arch}.expert_group_count": (0, 1),
    "{arch}.expert_group_used_count": (0, 1),
    "{arch}.expert_shared_count": (1,),
    "{arch}.expert_weights_norm": (True,),
    "{arch}.expert_weights_scale": (0.0, 1.0),
    "tokenizer.ggml.add_bos_token": (False,),
    "tokenizer.ggml.add_eos_token": (False,),
    "tokenizer.ggml.add_sep_token": (False,),
    "tokenizer.ggml.add_space_prefix": (False,),
    "tokenizer.ggml.remove_extra_whitespaces": (False,),
}
ABSENT_IN_MMPROJ: dict[str, tuple[Any, ...]] = {
    "general.type": ("mmproj",),
    "clip.has_audio_encoder": (False,),
    "clip.has_llava_projector": (False,),
    "clip.has_text_encoder": (False,),
    "clip.use_silu": (False,),
    "clip.vision.n_wa_pattern": (0,),
}
# Keys that older writers leave out: the engine then has its own default, or looks at the tensors.
# Those of YaRN are read for other architectures alone, and change nothing in these (tried).
MAY_LACK = re.compile(
    r"general\.(quantization_version|sampling\..+)"
    r"|.+\.rope\.scaling\.yarn_(attn_factor|beta_fast|beta_slow)"
)

# Tokens that are found by their text where no key names them: the first that the vocabulary has.
TOKEN_TEXTS: dict[str, tuple[str, ...]] = {
    "tokenizer.ggml.eot_token_id": ("<|im_end|>", "<|endoftext|>"),
    "tokenizer.ggml.fim_pre_token_id": ("<|fim_prefix|>",),
    "tokenizer.ggml.fim_suf_token_id": ("<|fim_suffix|>",),
    "tokenizer.ggml.fim_mid_token_id": ("<|fim_middle|>",),
    "tokenizer.ggml.fim_pad_token_id": ("<|fim_pad|>",),
    "tokenizer.ggml.fim_rep_token_id": ("<|repo_name|>",),
    "tokenizer.ggml.fim_sep_token_id": ("<|file_sep|>",),
    "tokenizer.ggml.prefix_token_id": ("<|fim_prefix|>",),
    "tokenizer.ggml.suffix_token_id": ("<|fim_suffix|>",),
    "tokenizer.ggml.middle_token_id": ("<|fim_middle|>",),
}

# Sizes that may be given for every block; other kinds that are read as the one that is written.
BY_BLOCK = (
    "{arch}.feed_forward_length",
    "{arch}.attention.head_count",
    "{arch}.attention.head_count_kv",
    "{arch}.expert_used_count",
)
INTEGERS = ("array[int32]", "array[uint32]")
KINDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(BY_BLOCK, INTEGERS),
    "{arch}.rope.dimension_sections": INTEGERS,
    "{arch}.attention.recurrent_layers": INTEGERS,
}


def is_record(key: str, arch: str) -> bool:
    """Whether nothing is computed from a key in a file of this architecture."""
    space = key.partition(".")[0]
    if space not in READ | {arch} | _architectures():
        return True
    return key in RECORDS or RECORD_FAMILIES.fullmatch(key) is not None


@cache
def _architectures() -> frozenset[str]:
    from gguf import MODEL_ARCH_NAMES

    return frozenset(MODEL_ARCH_NAMES.values())


def of_arch(table: Mapping[str, T], arch: str) -> dict[str, T]:
    """Return one of the tables with the prefix of an architecture in its keys."""
    return {key.format(arch=arch): row for key, row in table.items()}
