"""Figures of layers and tokens, in one look."""
