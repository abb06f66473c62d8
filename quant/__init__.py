"""Which numbers: how one weight is stored in fewer bits, and which weights may be."""
