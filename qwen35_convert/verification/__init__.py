"""Proof of an artifact."""
