"""Other ways to keep every activation, each in a file of its own."""
