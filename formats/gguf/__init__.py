"""GGUF files: header, names, metadata, tokenizer, vision tower."""
