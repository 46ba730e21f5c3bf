"""Shows how far long work is: on a terminal, in a notebook, or in a file."""
