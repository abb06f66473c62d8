"""A GGUF file, whole or split, with its vision file."""
