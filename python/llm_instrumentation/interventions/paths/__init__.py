"""Paths through a pre-norm decoder: its edges by number, what nodes write, and gradients there."""
