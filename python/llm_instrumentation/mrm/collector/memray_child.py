"""``python -m ...memray_child FOLDER SETTINGS (-m MODULE | SCRIPT) ARGUMENTS``.

Runs a Python program as ``python`` does, while memray records it into FOLDER. SETTINGS is a JSON
object with the arguments of :class:`.memray_runner.MemrayRunner`, which starts this command.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

from .memray_runner import record_child


def main() -> None:
    folder, settings, *command = sys.argv[1:]

    def run() -> None:
        if command[0] == "-m":
            sys.argv = command[1:]
            sys.path[0] = os.getcwd()
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
            runpy.run_path(command[0], run_name="__main__")

    record_child(Path(folder), json.loads(settings), run)


if __name__ == "__main__":
    main()
