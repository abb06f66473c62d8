"""Choosing forms of weights by size: the best artifact that fits."""
