"""What exists for programs written for mrm-trace 0.1.6. Nothing else here uses it.

The modules under the documented paths import their names from here.
"""
