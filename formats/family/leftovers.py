"""What another quantiser, a trainer or a task left in a checkpoint: refused by name."""

from __future__ import annotations

from formats.family.names import normalise
from formats.stored import Problem
from formats.tensor import TensorInfo

FROM_ORIGINAL = "convert the unquantised checkpoint it was made from"
MERGE = "merge it into its base model, and convert the result: peft's merge_and_unload()"
GATHER = "save the whole model: FSDP with StateDictType.FULL_STATE_DICT"
# last segment of a name: what wrote it
LEFTOVERS = {
    "qweight": "GPTQ or AWQ", "qzeros": "GPTQ or AWQ", "g_idx": "GPTQ",
    "scales": "GPTQ, AWQ or MLX", "biases": "MLX", "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes", "nested_absmax": "bitsandbytes",
    "nested_quant_map": "bitsandbytes", "SCB": "bitsandbytes",
    "weight_format": "bitsandbytes", "weight_packed": "compressed-tensors 4-bit",
    "weight_shape": "compressed-tensors 4-bit", "weight_zero_point": "compressed-tensors",
    "weight_global_scale": "NVFP4", "weight_scale_2": "NVFP4",
    "gate_up_proj_packed": "compressed-tensors 4-bit",
}  # fmt: skip
LEFTOVER_PARTS = {"quant_state": "bitsandbytes"}
# Segments of an adapter's tensors: LoRA, DoRA, IA3, OFT, LoHa, LoKr, VeRA, and whole modules.
ADAPTER_PARTS = frozenset(
    {"lora_A", "lora_B", "lora_a", "lora_b", "lora_embedding_A", "lora_embedding_B"}
    | {"lora_magnitude_vector", "lora_bias", "ia3_l", "oft_r", "oft_R", "oft_s", "boft_R", "boft_s"}
    | {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2"}
    | {"lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"}
    | {"vera_A", "vera_B", "vera_lambda_b", "vera_lambda_d", "modules_to_save", "original_module"}
    | {"prompt_embeddings", "trainable_tokens_delta", "trainable_tokens_original"}
)
FLAT = ("flat_param", "_flat_param")
TASK_HEADS = ("score", "classifier", "v_head", "reward_head", "qa_outputs")


def leftover(info: TensorInfo) -> Problem | None:
    """Recognise what another quantiser or trainer left behind."""
    segments = info.name.split(".")
    writer = LEFTOVERS.get(segments[-1])
    if writer is None:
        writer = next((LEFTOVER_PARTS[s] for s in segments if s in LEFTOVER_PARTS), None)
    if writer:
        return Problem(info.name, f"was written by {writer}", FROM_ORIGINAL)
    if ADAPTER_PARTS.intersection(segments):
        return Problem(info.name, "belongs to an adapter (LoRA) that is not merged", MERGE)
    if segments[-1] in FLAT:
        return Problem(info.name, "is a rank's share of many tensors in one row, by FSDP", GATHER)
    if normalise(info.name).split(".")[0] in TASK_HEADS:
        return Problem(
            info.name,
            "is a task head, not part of a language model",
            "convert the base model; a head has no place in a text artifact",
        )
    if segments[-1] == "weight" and info.dtype in ("U8", "I8", "I32", "U32"):
        return Problem(
            info.name, f"is packed {info.dtype} with shape {list(info.shape)}", FROM_ORIGINAL
        )
    return None
