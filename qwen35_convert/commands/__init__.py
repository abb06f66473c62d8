"""The commands: each parses, makes one call of `qwen35_convert.api`, prints."""
