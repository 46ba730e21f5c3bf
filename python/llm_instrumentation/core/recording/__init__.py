"""A running capture in parts: its plan, session, calls, counters, segments and end."""
