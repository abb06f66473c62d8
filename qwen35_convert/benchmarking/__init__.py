"""Timing an artifact beside what its card needs at least."""
