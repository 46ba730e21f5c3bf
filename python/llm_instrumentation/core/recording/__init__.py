"""A running capture: the hooks on the models, and what they do until the capture ends."""
