"""Documented names without code of their own: each module leads to where the thing is.

``config``: how a capture is set up. ``logging``: the package's logger. ``metrics``: what
captures and profilers count.
"""
