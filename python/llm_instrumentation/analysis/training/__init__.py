"""Rows in a random order, for captures that are larger than memory."""
