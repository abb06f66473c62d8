"""Calibration: weights encoded by what a text makes of their inputs, one layer in memory."""
