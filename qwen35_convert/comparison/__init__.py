"""Artifacts of one source beside each other: what each is, and what it costs."""
