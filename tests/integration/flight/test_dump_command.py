"""`strap dump PID` has the recorder of another process write its steps."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig
from llm_instrumentation.errors import (
    NotFoundError,
    StrapIOError,
    StrapPermissionError,
    StrapTimeoutError,
)
from llm_instrumentation.flight import FlightRecorder, flight_recorder, load_trigger, request_dump
from torch import nn

# A model that hangs in its seventh step, and says so.
HANGS = """
import sys, time
import torch
from llm_instrumentation import InstrumentationConfig
from llm_instrumentation.flight import flight_recorder

class Hangs(torch.nn.Module):
    calls = 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 7:
            print("hangs", flush=True)
            time.sleep(600)
        return x

model = torch.nn.Sequential(torch.nn.Linear(4, 4), Hangs())
config = InstrumentationConfig.balanced().with_gradients()
with flight_recorder(model, "run", memory_gb=0.01, config=config):
    for step in range(8):
        model(torch.ones(2, 4)).sum().backward()
"""


def strap(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "llm_instrumentation", "dump", *map(str, arguments)],
        check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_a_model_that_hangs(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HANGS], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as hung:
        try:
            assert hung.stdout.readline() == "hangs\n"
            done = strap(hung.pid, "--reason", "it hangs")
            assert done.stdout == f"{tmp_path}/run-000001: steps 0 to 6\n", done.stderr
            again = strap(hung.pid, "--json")
            (second,) = json.loads(again.stdout)["dumps"]
        finally:
            hung.send_signal(signal.SIGKILL)
    assert load_trigger(tmp_path / "run-000001").trigger.reason == "it hangs"
    with ActivationReader(tmp_path / "run-000001") as reader:
        assert reader.run.finished and reader.steps == tuple(range(7))
        assert [one.step for one in reader.select("0!grad")] == [0, 1, 2, 3, 4, 5]
        assert len(reader["0"]) == 7 and len(reader["1"]) == 6
    assert second["path"] == f"{tmp_path}/run-000002" and second["first_step"] is None


def test_what_cannot_be_asked(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        done = strap(other.pid)
        assert done.returncode == 5
        assert f"no flight recorder runs in process {other.pid}" in done.stderr
        assert other.poll() is None  # no signal has ended it
        other.communicate(b"\n")
    with pytest.raises(NotFoundError, match=f"there is no process {other.pid}"):
        request_dump(other.pid)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root")
def test_the_process_of_another_user():
    code = (
        "from llm_instrumentation.errors import StrapPermissionError\n"
        "from llm_instrumentation._dump_requests import request_dump\n"
        "import os; os.setuid(65534)\n"
        "try: request_dump(os.getppid())\n"
        "except StrapPermissionError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == f"process {os.getpid()} is of the user 0, not of this one\n"
    assert issubclass(StrapPermissionError, PermissionError)


def test_all_recorders_of_a_process(tmp_path):
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    config = InstrumentationConfig.balanced()
    with flight_recorder(model, tmp_path / "a", memory_gb=0.01, config=config, after=5) as first:
        model(torch.ones(1, 4))
        with flight_recorder(other, tmp_path / "b", memory_gb=0.01) as second:
            other(torch.ones(1, 4))
            waits = first.dump("mine")  # it waits for five steps more
            dumps = request_dump(os.getpid())
            assert sorted(one.path for one in dumps) == [waits, tmp_path / "b-000001"]
            assert [one.last_step for one in dumps] == [0, 0]
        assert first.dumps[0].trigger.reason == "mine"
        assert second.dumps[0].trigger.reason == "asked for by another process"
        assert len(request_dump(os.getpid())) == 1
    with pytest.raises(NotFoundError, match="no flight recorder runs"):
        request_dump(os.getpid())
    assert not [one for one in threading.enumerate() if one.name == "strap-flight-ask"]
    with FlightRecorder(model, tmp_path / "a", memory_gb=0.01):
        assert len(request_dump(os.getpid())) == 1


def test_a_dump_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    model = nn.Linear(4, 4)
    with flight_recorder(model, tmp_path / "file" / "run", memory_gb=0.01):
        with pytest.raises(StrapIOError, match="could not write a dump: .*File exists"):
            request_dump(os.getpid())


def test_an_answer_that_comes_too_late(tmp_path):
    def condition(output):  # a recorder answers when its model's thread is done with this
        with pytest.raises(StrapTimeoutError, match=r"did not answer within 0\.1 s"):
            request_dump(os.getpid(), timeout_s=0.1)
        asked.append(output)

    asked: list[torch.Tensor] = []
    model = nn.Linear(4, 4)
    with flight_recorder(model, tmp_path / "run", memory_gb=0.01, condition=condition):
        model(torch.ones(1, 4))
    assert len(asked) == 1


def test_a_name_that_is_taken(tmp_path):
    namespace = os.stat("/proc/self/ns/pid").st_ino
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(f"\0llm_instrumentation/flight/{namespace}/{os.getpid()}".encode())
        with (
            pytest.warns(RuntimeWarning, match=f"strap dump {os.getpid()} cannot reach"),
            flight_recorder(nn.Linear(4, 4), tmp_path / "run", memory_gb=0.01) as recorder,
        ):
            assert recorder.stats().steps == 0


def test_a_child_of_a_fork_does_not_keep_the_name(tmp_path):
    model = nn.Linear(4, 4)
    read, write = os.pipe()
    with flight_recorder(model, tmp_path / "run", memory_gb=0.01):
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)  # until the parent closes its end
            os._exit(0)
    with flight_recorder(model, tmp_path / "run", memory_gb=0.01):
        assert len(request_dump(os.getpid())) == 1
    os.close(write)
    os.waitpid(child, 0)
    os.close(read)
