"""Names of the files beside the weights, as transformers writes them and engines read them."""

from __future__ import annotations

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
VOCAB, MERGES = "vocab.json", "merges.txt"
TEMPLATE, LEGACY_TEMPLATE = "chat_template.jinja", "chat_template.json"
IMAGES, VIDEOS = "preprocessor_config.json", "video_preprocessor_config.json"
PROCESSOR = "processor_config.json"
