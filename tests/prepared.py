"""Python processes that have imported torch and transformers already.

Importing them takes longer than most of the programs that tests run. A server imports them once and
forks a process for each program::

    said = prepared.run(tmp_path / "script.py", "argument", cwd=tmp_path)
    child = subprocess.Popen([prepared.python(), "-c", code])

Programs that depend on what is imported when, on memory or on other users need `sys.executable`,
and so do those that a test kills: the forked process ends a moment after the started one.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["TORCH", "TRANSFORMERS", "python", "run", "strap"]

TORCH = ("pyarrow.parquet", "torch")
TRANSFORMERS = (
    *TORCH, "torch._dynamo", "transformers.generation.utils",
    "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto",
)  # fmt: skip

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent / "python"


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
    done = subprocess.run(
        [python(imports), "-W", "error::DeprecationWarning:__main__", script, *arguments],
        cwd=cwd, env={**os.environ, **env}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, (
        f"{script} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


def strap() -> list[str]:
    """What a command line of the command ``strap`` begins with."""
    return [python(TORCH), "-m", "llm_instrumentation.cli"]


@functools.cache
def python(imports: tuple[str, ...] = TRANSFORMERS) -> str:
    """An interpreter to start in place of `sys.executable`, for ``-c``, ``-m`` and scripts.

    The process that is started passes its files, signals and end between the caller and the process
    that was forked. `os.getpid()` is that of the latter. Variables that an import or Go reads, such
    as OMP_NUM_THREADS, are those of the server.
    """
    folder = tempfile.TemporaryDirectory(prefix="prepared-")
    program, socket = Path(folder.name, "python"), Path(folder.name, "socket")
    program.write_text(
        f"#!{sys.executable} -IS\nimport sys\nsys.path.insert(0, {str(HERE)!r})\n"
        f"from prepared_server import ask\nask({str(socket)!r}, [__file__, *sys.argv[1:]])\n"
    )
    program.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, HERE / "prepared_server.py", socket, *imports], text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(PACKAGE), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == "ready\n", "the server of prepared processes failed"

    def end() -> None:
        process.communicate()  # its input ends, so it does
        folder.cleanup()

    atexit.register(end)
    return str(program)
