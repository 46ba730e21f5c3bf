"""The vectors of tokens: where they lie in a layer's tensors, and in which order."""
