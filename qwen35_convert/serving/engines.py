"""The engines, and which of them loads what: from which version on, how, or why not.

A row is about artifacts that have all of its traits (`serving.artifact`). An engine loads an
artifact if some row of it names each trait that the artifact needs, and none says `cannot`. Where
no row names one, nothing is known and nothing is said. `least` is the oldest version that was run
with such an artifact, or whose source or documentation was read: an older one may do.

Sources. vLLM: its recipes for Qwen3.5 (0.17.0; `mtp`); source at 0.26 and 0.33; text classes since
0.27, their MTP head since 0.28; artifacts of ours that were loaded in 0.26, whose parser takes the
lines. SGLang: its Qwen3.5 cookbook and the images that run it (0.5.9); source at 0.5.16; the parser
of 0.5.23, which takes the lines; issues 35797 and 37828. transformers: release 5.2.0; loaded in
5.24. llama.cpp: pull requests 19468 (qwen35), 20506 (NVFP4), 22673 (MTP, first in b9180), 25334;
its server ran the lines (b10434). Ollama: its parser, its documentation of Modelfiles and imports;
0.30 is the first that runs GGUF files in llama.cpp's server, before that it refused many of this
family (issues 14545, 16282).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from formats.family.names import HUB, TEXT
from formats.quant_methods import COMPRESSED
from formats.stored import ONE_GROUP, ORDERED, ZEROS
from qwen35_convert.serving.artifact import (
    BLOCKS,
    EMBEDDED,
    FP8_BLOCK,
    FP8_BLOCK_PACKED,
    FP8_CACHE,
    GGUF_FILE,
    MIXTURE,
    MTP,
    NEXT,
    NO_VISION,
    NVFP4_BLOCKS,
    OTHER_CLASS,
    OTHER_NAMES,
    PLAIN,
    VISION,
    experts_in,
    others_in,
)

VLLM, SGLANG, TRANSFORMERS, LLAMA_CPP, OLLAMA = (
    "vllm", "sglang", "transformers", "llama.cpp", "ollama",
)  # fmt: skip
# Oldest first.
VERSIONS = {
    VLLM: ("vLLM 0.17", "vLLM 0.26", "vLLM 0.27", "vLLM 0.33"),
    SGLANG: ("SGLang 0.5.9", "SGLang 0.5.23"),
    TRANSFORMERS: ("transformers 5.2", "transformers 5.24"),
    LLAMA_CPP: ("llama.cpp with PR 19468", "llama.cpp with PR 20506", "llama.cpp b9180"),
    OLLAMA: ("Ollama 0.30",),
}
VLLM_17, VLLM_26, VLLM_27, VLLM_33 = VERSIONS[VLLM]
SGLANG_9, SGLANG_23 = VERSIONS[SGLANG]
TRANSFORMERS_2, TRANSFORMERS_24 = VERSIONS[TRANSFORMERS]
QWEN35, NVFP4_TYPE, MTP_BLOCK = VERSIONS[LLAMA_CPP]
(OLLAMA_30,) = VERSIONS[OLLAMA]


@dataclass(frozen=True, slots=True)
class Engine:
    """How an engine is started; `serving.commands` puts a model and flags into the templates.

    lines     joined by `between` they are one line to paste
    revision  what names the revision of a repository
    context   what sets the longest context, `batch` how many sequences are served at once
    """

    name: str
    lines: tuple[str, ...]
    revision: str = ""
    context: str = ""
    batch: str = ""
    between: str = " && "
    python: bool = False


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            VLLM,
            ("vllm serve {model}{flags}",),
            revision=" --revision {revision}",
            context=" --max-model-len {context}",
            batch=" --max-num-seqs {batch}",
        ),
        Engine(
            SGLANG,
            ("python -m sglang.launch_server --model-path {model}{flags}",),
            revision=" --revision {revision}",
            context=" --context-length {context}",
            batch=" --max-running-requests {batch}",
        ),
        Engine(
            TRANSFORMERS,
            (
                "import transformers",
                "model = transformers.{loader}.from_pretrained({model}, dtype='auto'{flags})",
            ),
            revision=", revision={revision}",
            between="; ",
            python=True,
        ),
        Engine(
            LLAMA_CPP,
            ("llama-server -m {model}{flags}",),
            context=" -c {cells}",
            batch=" -np {batch}",
        ),
        Engine(
            OLLAMA,
            (
                "printf '%s\\n' {from_model}{flags} > Modelfile",
                "ollama create {name} -f Modelfile",
            ),
            context=" 'PARAMETER num_ctx {context}'",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of an engine and the artifacts that have these traits.

    flags   of every start
    drafts  flags by which the MTP head drafts tokens
    loader  the class that loads it, for an engine that has several
    cannot  why it does not load them
    """

    engine: str
    traits: tuple[str, ...]
    least: str = ""
    flags: str = ""
    drafts: str = ""
    loader: str = ""
    note: str = ""
    cannot: str = ""


def _each(engines: tuple[str, ...], traits: tuple[str, ...], **more: str) -> Iterator[Row]:
    """Yield the same row of each engine for each trait."""
    return (Row(engine, (trait,), **more) for engine in engines for trait in traits)


FOLDERS, FILES = (VLLM, SGLANG, TRANSFORMERS), (LLAMA_CPP, OLLAMA)
FP8_CHANNEL, FP8_TENSOR, FP8 = "fp8-channel", "fp8-tensor", "fp8"
INT4, INT8, MXFP4 = "int4", "int8", "mxfp4a16"
GPTQ, AWQ = ("gptq-int4", "gptq-int8"), ("awq-int4",)
NVFP4_A16, NVFP4_A4 = ("nvfp4a16", "nvfp4a16 (modelopt)"), ("nvfp4", "nvfp4 (modelopt)")
NVFP4_PACKED = (NVFP4_A16[0], NVFP4_A4[0])
NVFP4_MODELOPT = (NVFP4_A16[1], NVFP4_A4[1])
FOUR_BITS = (*NVFP4_A16, *NVFP4_A4, MXFP4, INT4)
NEXTN = (
    " --speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4"
)
# Newer ones choose it by themselves, and the option is gone (0.5.23).
OLD_STRATEGY = "to draft, versions before 0.5.16 need --mamba-scheduler-strategy extra_buffer, too"
DRAFT = """ --speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'"""
DEQUANTIZE = ", quantization_config=transformers.CompressedTensorsConfig(dequantize=True)"
GGUF_ONLY = "it reads GGUF files; qwen35 convert {model} -o {name}.gguf"
BLACKWELL = "it computes in four bits on Blackwell (sm100), elsewhere with 16-bit activations"
ONLY_GROUP = "0.26 gets experts wrong whose rows are one group; quantize.group=64 or 32 is right"

ROWS: tuple[Row, ...] = (
    # Names and classes.
    Row(VLLM, (HUB,), VLLM_17),
    Row(VLLM, (TEXT,), VLLM_27),
    Row(VLLM, (NO_VISION,), VLLM_26, " --language-model-only"),
    Row(SGLANG, (HUB,), SGLANG_9),
    Row(SGLANG, (TEXT,), SGLANG_23),
    Row(SGLANG, (NO_VISION,), note="it still makes room for the vision tower (PR 37828)"),
    *_each((TRANSFORMERS,), (HUB, TEXT), least=TRANSFORMERS_2),
    *_each((TRANSFORMERS,), (NO_VISION, TEXT, NEXT), loader="AutoModelForCausalLM"),
    # The text class does not find what compressed-tensors lists as not quantised: FP8 with a cache
    # predicts at random then (tests/test_serving_lines.py).
    Row(TRANSFORMERS, (HUB, VISION), loader="AutoModelForImageTextToText"),
    *_each(FOLDERS, (NEXT,)),
    *_each(FOLDERS, (OTHER_NAMES,), cannot="no class has tensors of these names; convert it"),
    *_each(FOLDERS, (OTHER_CLASS,), cannot="config.json names another class; convert it"),
    *_each(FILES, (HUB, TEXT, NEXT, OTHER_NAMES, OTHER_CLASS), cannot=GGUF_ONLY),
    # Stored forms, in a folder.
    *_each(FOLDERS, (PLAIN, FP8_BLOCK)),
    Row(TRANSFORMERS, (FP8_BLOCK,), note="without a GPU it dequantises, which needs accelerate"),
    Row(VLLM, (FP8_BLOCK_PACKED,), VLLM_26),
    Row(TRANSFORMERS, (FP8_BLOCK_PACKED,), TRANSFORMERS_24),
    Row(VLLM, (FP8_TENSOR,), VLLM_33, note="what it fuses is rounded again, to one scale"),
    *_each((VLLM,), (FP8_CHANNEL, INT8, *FOUR_BITS, *GPTQ, *AWQ), least=VLLM_26),
    *_each((VLLM, SGLANG), NVFP4_A4, note=BLACKWELL),
    Row(VLLM, (ORDERED,), cannot="it refuses codes in the order of activations (g_idx)"),
    *(Row(VLLM, (form, ZEROS), cannot="it runs symmetric GPTQ only") for form in GPTQ),
    Row(VLLM, (experts_in(INT4), experts_in(ONE_GROUP)), cannot=ONLY_GROUP),
    *_each((SGLANG,), (FP8_TENSOR, INT8, *FOUR_BITS, GPTQ[0]), least=SGLANG_23),
    *_each(
        (SGLANG,),
        tuple(others_in(form) for form in NVFP4_MODELOPT),
        note="on Hopper add --fp4-gemm-backend marlin",
    ),
    Row(SGLANG, (GPTQ[0], ZEROS), cannot="it runs symmetric GPTQ only"),
    Row(SGLANG, (others_in(MXFP4),), cannot="it runs MXFP4 in experts only"),
    Row(SGLANG, (experts_in(INT8),), cannot="it runs experts in INT8 on NPUs only"),
    Row(TRANSFORMERS, (FP8_CHANNEL,), TRANSFORMERS_24),
    *_each(
        (TRANSFORMERS,),
        (*NVFP4_PACKED, INT4, INT8, MXFP4),
        least=TRANSFORMERS_24,
        flags=DEQUANTIZE,
    ),
    *_each((TRANSFORMERS,), NVFP4_MODELOPT, cannot="it does not read ModelOpt's NVFP4"),
    *_each((TRANSFORMERS,), (*GPTQ, *AWQ), note="it needs gptqmodel"),
    *_each(
        (TRANSFORMERS,),
        tuple(experts_in(form) for form in NVFP4_PACKED),
        cannot="dequantised, experts in NVFP4 lose their global scale",
    ),
    Row(TRANSFORMERS, (experts_in(INT8),), cannot="it fails at experts in INT8"),
    Row(TRANSFORMERS, (experts_in(INT4), ZEROS), cannot="it fails at experts with zero points"),
    Row(TRANSFORMERS, (MIXTURE,), cannot="it takes one form for all weights, and fails"),
    # What else a folder holds.
    Row(VLLM, (FP8_CACHE,), VLLM_26, " --kv-cache-dtype fp8"),
    Row(VLLM, (FP8_CACHE,), note="0.26 was run with --attention-backend TRITON_ATTN"),
    Row(SGLANG, (FP8_CACHE,), SGLANG_23, " --kv-cache-dtype fp8_e4m3"),
    Row(TRANSFORMERS, (FP8_CACHE,), note="it leaves the scales of the cache out, with a warning"),
    *(Row(VLLM, (names, MTP), drafts=DRAFT) for names in (HUB, TEXT)),
    Row(VLLM, (TEXT, MTP), note="drafts of text-only artifacts need vLLM 0.28"),
    *(Row(SGLANG, (form, MTP), drafts=NEXTN, note=OLD_STRATEGY) for form in (PLAIN, FP8)),
    Row(SGLANG, (COMPRESSED, MTP), note="it accepts no drafts of the MTP head (issue 35797)"),
    Row(TRANSFORMERS, (MTP,), note="it leaves the MTP head out"),
    # GGUF files.
    Row(LLAMA_CPP, (GGUF_FILE,)),
    Row(LLAMA_CPP, (BLOCKS,), QWEN35),
    Row(LLAMA_CPP, (NVFP4_BLOCKS,), NVFP4_TYPE),
    Row(LLAMA_CPP, (GGUF_FILE, MTP), MTP_BLOCK, drafts=" --spec-type draft-mtp"),
    Row(LLAMA_CPP, (GGUF_FILE, VISION), flags=" --mmproj {mmproj}"),
    Row(LLAMA_CPP, (EMBEDDED,), cannot="towers lie beside the text model, as in Ollama's files"),
    Row(OLLAMA, (GGUF_FILE,), OLLAMA_30),
    Row(OLLAMA, (BLOCKS,)),
    Row(OLLAMA, (GGUF_FILE, MTP), drafts=" 'PARAMETER draft_num_predict 4'"),
)
