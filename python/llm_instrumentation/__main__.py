"""``python -m llm_instrumentation`` is the command ``strap``."""

from .cli import main

main()
