"""Checkpoints on the hub: listing, download, streaming."""
