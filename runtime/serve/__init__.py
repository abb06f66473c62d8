"""The serving loop: requests in, tokens out."""
