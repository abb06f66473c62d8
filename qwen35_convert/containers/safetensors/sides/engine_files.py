"""Files that engines find by their names beside the tensors of a folder, and obey.

Whatever else lies there is its owner's: cards, licences, images, logs.

Sources: transformers 5.24 (`from_pretrained` of models, tokenizers and processors, PEFT), vLLM's
`get_config`, `get_quant_config` and `get_pooling_config`, SGLang's `ModelConfig`, llama.cpp's
`convert_hf_to_gguf.py`. Not here: what is read only where another file is missing (tekken.json,
tiktoken.model) or named by a field that is judged itself (config.4.0.0.json).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from formats.safetensors.index import INDEX
from formats.side_names import CONFIG

REMOTE_CODE = "transformers, vLLM and SGLang run it, if they are told to trust code"
SENTENCES = "vLLM takes the model for a sentence embedder"
PICKLES = "engines that are told to load pickles take its weights"
# What headers and the census are about.
WEIGHTS = ("*.safetensors", INDEX, CONFIG)
# A whole name or a family of them, and what comes of it; nobody compares what is in them.
OTHERS: Mapping[str, str] = {
    "adapter_*": "transformers loads the adapter over the weights",
    "hf_quant_config.json": "vLLM, SGLang and TensorRT-LLM take the weights for ModelOpt's",
    "*quant_config.json": "vLLM takes it for the config of AWQ",
    "*quantize_config.json": "vLLM takes it for the config of GPTQ",
    "quantization_config.json": "engines take it for the config of the quantisation",
    "quant_model_description.json": "SGLang takes the weights for ModelSlim's",
    "tokenizer.model": "llama.cpp and slow tokenizers take it for the tokenizer",
    "additional_chat_templates/*.jinja": "transformers takes it for tools and by its name",
    "audio_tokenizer_config.json": "transformers loads a second model by it",
    "modules.json": SENTENCES,
    "*_Pooling/config.json": SENTENCES,
    "config_sentence_transformers.json": "sentence-transformers puts its prompts before the text",
    "sentence_*_config.json": "vLLM cuts the context to its max_seq_length",
    "*.py": REMOTE_CODE,
    "custom_generate/*.py": REMOTE_CODE,
    "pytorch_model*.bin": PICKLES,
    "pytorch_model.bin.index.json": PICKLES,
}


def engine_files(folder: Path, patterns: Iterable[str]) -> list[str]:
    """Return the names of the files in a folder that have one of these names."""
    paths = (path for pattern in patterns for path in folder.glob(pattern) if path.is_file())
    return sorted({path.relative_to(folder).as_posix() for path in paths})
