"""The same ten tables by other means, for benchmarks/memtrace.py."""
