"""A real S3 server on loopback: versitygw, which packaging/versitygw.py builds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
KEY, SECRET = "AKIDTESTER", "a-secret-of-the-tests"


def program() -> Path:
    """The server's program. Skips the test if it was not built."""
    sys.path.insert(0, str(ROOT / "packaging"))
    try:
        import versitygw
    finally:
        sys.path.remove(str(ROOT / "packaging"))
    if not (found := versitygw.program()).exists():
        pytest.skip("needs packaging/versitygw.py to have run")
    return found


class S3Server:
    """A server over a folder.

    Attributes:
        url: its endpoint.
        folder: has a folder for each bucket, and a file for each object.
        environment: variables that let clients reach it.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.environment = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def create_bucket(self, name: str) -> Path:
        bucket = self.folder / name
        bucket.mkdir(exist_ok=True)
        return bucket


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """Runs a server over a new folder inside of this one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    objects, metadata = folder / "objects", folder / "metadata"
    objects.mkdir()
    metadata.mkdir()
    command = [
        str(program()), "--port", f"127.0.0.1:{port}", "--region", "us-east-1", "--quiet",
        "posix", "--sidecar", str(metadata), str(objects),
    ]  # fmt: skip
    with open(folder / "server.log", "wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log,
            env=os.environ | {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET},
        )  # fmt: skip
        try:
            _wait(server, port, folder / "server.log")
            yield S3Server(f"http://127.0.0.1:{port}", objects)
        finally:
            server.terminate()
            server.wait(60)


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert server.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.05)
