"""Kernels that a forward pass begins with."""
