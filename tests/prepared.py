"""Python programs in processes of their own, which have imported torch and transformers already.

Importing them takes longer than most of the programs that tests run. A server imports them once
and forks a process for each program::

    said = prepared.run(tmp_path / "script.py", "argument", cwd=tmp_path)

Programs that depend on what is imported when, on signals or on other users need
`subprocess.run`.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

__all__ = ["TORCH", "TRANSFORMERS", "run"]

TORCH = ("pyarrow.parquet", "torch")
TRANSFORMERS = (*TORCH, "transformers.generation.utils")

SERVER = """
import atexit, importlib, json, os, runpy, sys, threading, traceback, warnings
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    asked = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    status = 1
    try:
        for number, path in enumerate((os.devnull, asked["out"], asked["err"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
        sys.stdin = open(0, closefd=False)
        os.chdir(asked["cwd"])
        os.environ.clear()
        os.environ.update(asked["env"])
        sys.argv = asked["argv"]
        sys.path[0] = os.path.dirname(sys.argv[0])
        warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
"""


def run(
    script: Path,
    *arguments: str | Path,
    cwd: Path,
    imports: tuple[str, ...] = TRANSFORMERS,
    **env: str,
) -> str:
    """What a Python script prints. It must succeed; the error has all that it has printed.

    A DeprecationWarning of one of its own lines ends it.

    Args:
        script: its file.
        arguments: sys.argv behind the script.
        cwd: the folder it runs in.
        imports: what the process has imported when it begins.
        env: more environment variables.
    """
    asks, answers = _server(imports)
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        out.touch(), err.touch()
        asked = {
            "argv": [str(script), *map(str, arguments)], "cwd": str(cwd), "out": str(out),
            "err": str(err), "env": {**os.environ, **env},
        }  # fmt: skip
        asks.write(json.dumps(asked) + "\n")
        asks.flush()
        status = answers.readline().strip()
        assert status == "0", f"{script} ended with {status}\n{out.read_text()}\n{err.read_text()}"
        return out.read_text()


@functools.cache
def _server(imports: tuple[str, ...]) -> tuple[IO[str], IO[str]]:
    package = Path(__file__).resolve().parents[1] / "python"
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, *imports], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(package), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    atexit.register(process.stdin.close)  # it ends then
    return process.stdin, process.stdout
