"""FP8 E4M3 with one scale per block, row or tensor."""
