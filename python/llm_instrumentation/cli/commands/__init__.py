"""The commands of `strap`: a file for each, with its options, its work and what it prints."""
