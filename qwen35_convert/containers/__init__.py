"""The kinds of artifact: a folder of safetensors, a GGUF file."""
