"""Kernels of speculation: between the model and the MTP head that drafts for it."""
