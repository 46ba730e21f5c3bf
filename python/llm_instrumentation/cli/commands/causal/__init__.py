"""The commands that measure the effects of a model's parts between pairs of texts."""
