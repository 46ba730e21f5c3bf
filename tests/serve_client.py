"""A client of `strap serve`, and the command in a process of its own."""

from __future__ import annotations

import http.client
import json
import subprocess
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import prepared
from llm_instrumentation.serve import CaptureServer

GOLDEN = Path(__file__).parent / "golden"
HANG_S = 120  # a time limit, in seconds, that only a hang reaches
LAYER = "encoder.layer.3"
WEIGHTS = f"{LAYER}.attention.self[1]"
STEPS = 3


class Client:
    """Asks a server, as its page does."""

    def __init__(self, server: CaptureServer) -> None:
        parts = urllib.parse.urlsplit(server.url)
        self.port = int(parts.port or 0)
        self.token = parts.query.removeprefix("token=")
        self.owner = {"X-Strap-Token": self.token}

    def send(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, names, answer.read()
        finally:
            connection.close()

    def ask(self, name: str, **query: Any) -> Any:
        """What an address below /api/ answers: JSON, or an array; an error as (status, text)."""
        path = f"/api/{name}?{urllib.parse.urlencode(query)}"
        status, headers, content = self.send(path, **self.owner)
        if status != 200:
            return status, json.loads(content)["error"]
        if headers["content-type"] == "application/json":
            return json.loads(content)
        if headers["content-type"] == "application/x-ndjson":
            last = json.loads(content.splitlines()[-1])
            return last.get("found", last)
        length = int.from_bytes(content[:4], "little")
        about = json.loads(content[4 : 4 + length])
        return np.frombuffer(content[4 + length :], "<f4").reshape(about["shape"])


def until(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def started(*arguments: str | Path) -> tuple[subprocess.Popen[str], str]:
    """The command, and the address that it prints."""
    running = subprocess.Popen(
        [*prepared.strap(), "serve", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None
    assert "Ctrl-C" in running.stdout.readline()
    return running, running.stdout.readline().strip()
