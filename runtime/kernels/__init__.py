"""One file per kernel: the plain-torch reference, the wrapper, the Triton kernel."""
