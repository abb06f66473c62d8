"""Encoders on the GPU: rows of activations to FP8, weights to types of ggml."""
