"""Disks that are full, and disks that do not answer."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation.errors import NoSpaceError


def _mount(*command: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{' '.join(command)}: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 8 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    _mount("mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder))
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def freezable_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 256 MB on a loop device, for fsfreeze."""
    for tool in ("mkfs.ext4", "fsfreeze"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    image, folder = tmp_path / "disk.img", tmp_path / "disk"
    folder.mkdir()
    with open(image, "wb") as file:
        file.truncate(256 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    _mount("mount", "-o", "loop", str(image), str(folder))
    yield folder
    subprocess.run(["fsfreeze", "-u", folder], capture_output=True)  # where a test failed frozen
    subprocess.run(["umount", "-l", folder], check=True)


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 64))


def test_a_full_disk_ends_the_capture_and_not_the_model(small_disk: Path) -> None:
    net, x = model(), torch.randn(256, 64)
    with torch.no_grad():
        expected = net(x)
    path = small_disk / "full.stream"
    config = InstrumentationConfig.fast_capture().with_memory_limit(0.004)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with (
            pytest.raises(NoSpaceError) as failure,
            torch.no_grad(),
            capture_activations(net, path, config=config),
        ):
            for _ in range(60):
                assert torch.equal(net(x), expected)
    assert isinstance(failure.value, OSError)
    assert failure.value.errno == errno.ENOSPC
    assert sum("the model goes on" in str(w.message) for w in caught) == 1
    with ActivationReader(path, warn=False) as reader:
        outputs = reader["2"]
        assert len(outputs) > 3
        for activation in outputs:
            assert torch.equal(activation.to_torch(), expected.half())


def test_strict_raises_in_the_forward_pass(small_disk: Path) -> None:
    net, x = model(), torch.randn(256, 64)
    config = InstrumentationConfig.fast_capture().with_memory_limit(0.004).with_strict()
    passes = 0
    with (
        pytest.raises(NoSpaceError),
        warnings.catch_warnings(),
        torch.no_grad(),
        capture_activations(net, small_disk / "strict.stream", config=config),
    ):
        warnings.simplefilter("ignore")
        for _ in range(60):
            net(x)
            passes += 1
    assert 0 < passes < 60


# A capture whose hooks wait for a disk that does not answer, until Ctrl-C.
FROZEN = """
import sys, time, warnings
import torch
from llm_instrumentation import InstrumentationConfig, capture_activations

warnings.simplefilter("ignore")
where, path = sys.argv[1:]
net, x = torch.nn.Linear(64, 4096), torch.randn(64, 64)
config = InstrumentationConfig.fast_capture().with_memory_limit(0.002)
if where == "end":
    config.with_memory_limit(0.1)
try:
    with torch.no_grad(), capture_activations(net, path, config=config) as framework:
        for i in range(20):
            net(x)
        while framework.stats().queued_packets:
            time.sleep(0.01)
        print("running", flush=True)
        sys.stdin.readline()
        for i in range(20 if where == "end" else 10**9):
            net(x)
        print("ending", flush=True)
except KeyboardInterrupt:
    print("out", time.monotonic(), flush=True)
"""


@pytest.mark.parametrize("where", ["inside", "end"])
def test_ctrl_c_ends_a_block_whose_disk_does_not_answer(freezable_disk: Path, where: str) -> None:
    path = freezable_disk / "frozen.stream"
    child = subprocess.Popen(
        [sys.executable, "-c", FROZEN, where, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "running\n"
        subprocess.run(["sync", "-f", freezable_disk], check=True)
        subprocess.run(["fsfreeze", "-f", freezable_disk], check=True)
        child.stdin.write("\n")
        child.stdin.flush()
        time.sleep(1.5)  # by now it waits for the disk
        assert child.poll() is None
        sent = time.monotonic()
        child.send_signal(signal.SIGINT)
        lines = [child.stdout.readline()]
        if where == "end":
            assert lines == ["ending\n"]
            lines.append(child.stdout.readline())
        word, at = lines[-1].split()
        latency = float(at) - sent
        print(f"{where}: {latency:.2f} s from Ctrl-C to the end of the block")
        assert word == "out"
        assert latency < 1.0
    finally:
        subprocess.run(["fsfreeze", "-u", freezable_disk], check=True)
        child.stdin.close()
    assert child.wait(60) == 0
    with ActivationReader(path, warn=False) as reader:
        assert len(reader[""]) >= 20
        for activation in reader[""]:
            assert activation.to_torch().shape == (64, 4096)
