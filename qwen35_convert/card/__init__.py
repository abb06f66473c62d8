"""Model cards: what a source's README.md says of it, and the card of an artifact."""
