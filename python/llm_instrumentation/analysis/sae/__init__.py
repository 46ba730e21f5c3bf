"""Sparse autoencoders: training, features, and the files of both."""
