"""The one pass over the weights: items, executors, memory."""
