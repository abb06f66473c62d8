"""A folder of safetensors."""
