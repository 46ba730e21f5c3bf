"""The files beside a stream: its calls, run folders, and what an earlier capture left."""
