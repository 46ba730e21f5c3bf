"""Documented module paths for names that other modules define.

``config``: the configuration of a capture. ``logging``: the package's logger. ``metrics``: the
counters of captures and profilers.
"""
