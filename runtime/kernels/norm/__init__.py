"""Norms of the residual stream and of the delta rule's output."""
