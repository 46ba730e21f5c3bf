"""Runs of a model in which the tensors of sites are read or replaced."""
