"""The values of IQ4's codes, over the scale: unevenly spaced, as weights are dense near 0.

Source: llama.cpp's ggml-common.h at b11434, `kvalues_iq4nl`.
"""

TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
