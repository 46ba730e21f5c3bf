"""Helpers under the paths that they have in mrm-trace. Nothing in this package uses them."""
