"""The sparse feed-forward: router, chosen experts, shared expert."""
