"""Paths through a decoder: its edges by number, what nodes write, and gradients there."""
