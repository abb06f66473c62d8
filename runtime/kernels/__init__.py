"""Triton kernels beside their references; `dispatch` says which one runs when."""
