"""Pairs of tensors, and how much two tensors differ."""
