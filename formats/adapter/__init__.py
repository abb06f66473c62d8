"""Adapters (LoRA) as PEFT saves them: what they change of a model, without doing it."""
