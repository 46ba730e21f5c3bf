"""How a capture is read: index, packets, parts, and what the calls were given."""
