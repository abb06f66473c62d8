"""Which bytes and names: file formats and the Qwen3.5 family as a table."""
