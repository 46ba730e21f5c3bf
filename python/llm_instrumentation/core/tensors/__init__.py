"""What a tensor becomes on its way from a module's output to the session."""
