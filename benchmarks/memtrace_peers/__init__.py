"""The same ten tables by other libraries, and inputs, for benchmarks/memtrace.py."""
