"""What exists for programs written for llm_instrumentation 1.3.1. Nothing else here uses it.

The modules under the documented paths import their names from here.
"""
