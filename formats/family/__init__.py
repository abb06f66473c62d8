"""The Qwen3.5 family: its table of tensors, their roles, sizes, and the layouts they come in."""
