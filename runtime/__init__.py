"""Does it compute: the Qwen3.5 forward pass, kernels beside their references."""
