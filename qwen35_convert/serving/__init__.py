"""How an artifact is served: which engines load it, their command lines, the memory they take."""
