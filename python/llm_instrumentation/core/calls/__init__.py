"""What the model was given: its calls, steps, tokens, masks, caches and sequences."""
