"""Which ggml type each tensor of a GGUF file gets."""
