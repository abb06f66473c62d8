"""ggml's types: the bytes of their blocks, and back."""
