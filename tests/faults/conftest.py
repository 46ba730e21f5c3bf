"""Fixtures: disks that fill up, freeze or are slow, and the processes that write to them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # tests and their child processes import `children`

from children import Child, thaw  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--faults-long",
        action="store_true",
        help="ten times the kills and more, ten-second waits, an hour of watching",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--faults-long", default=False):
        for item in items:
            item.add_marker(pytest.mark.timeout(3 * 3600))


@pytest.fixture
def long(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--faults-long", default=False))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.stream"


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Starts ``function(tell, *args)`` in a child process. Kills the child after the test."""
    children: list[Child] = []

    def started(function: Callable[..., None], *args: object) -> Child:
        children.append(Child(function, *args))
        return children[-1]

    yield started
    for child in children:
        child.end()


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the text of a program in a new interpreter, up to the interpreter's own end."""

    def run(text: str, *args: object) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, sys.path)])}
        return subprocess.run(
            [sys.executable, "-c", text, *map(str, args)],
            check=False, capture_output=True, text=True, timeout=200, env=env,
        )  # fmt: skip

    return run


# ---- disks ------------------------------------------------------------------------


def _run(*command: object) -> str:
    done = subprocess.run([*map(str, command)], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mounts a file system: ``mount("tmpfs", size)`` or ``mount("ext4", size, options)``.

    The image file of an ext4 lies in ``within``, or in tmp_path. It takes room only as it fills.
    """
    if os.geteuid() != 0:
        pytest.skip("mounting a file system takes root")
    folders: list[Path] = []

    def mounted(kind: str, size: int, options: str = "rw", within: Path | None = None) -> Path:
        folder = tmp_path / f"disk{len(folders)}"
        folder.mkdir()
        what: list[object] = ["-t", "tmpfs", "-o", f"size={size},{options}", "tmpfs"]
        if kind == "ext4":
            if shutil.which("mkfs.ext4") is None:
                pytest.skip("no mkfs.ext4")
            image = (within or tmp_path) / f"{folder.name}.img"
            with image.open("wb") as file:
                file.truncate(size)
            _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=1", image)
            what = ["-o", f"loop,{options}", image]
        done = subprocess.run(
            ["mount", *map(str, what), folder], check=False, capture_output=True, text=True
        )
        if done.returncode != 0:
            pytest.skip(f"cannot mount {kind} here: {done.stderr.strip()}")
        folders.append(folder)
        return folder

    yield mounted
    for folder in reversed(folders):
        with suppress(OSError):  # fails if the file system is not frozen, which is fine
            thaw(folder)
        _run("umount", "--lazy", folder)


@pytest.fixture
def tmpfs(mount: Callable[..., Path]) -> Path:
    """A file system of 24 MiB."""
    return mount("tmpfs", 24 << 20)


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(request: pytest.FixtureRequest, mount: Callable[..., Path]) -> Path:
    """A file system of 24 MiB: tmpfs without direct I/O, and ext4 with it."""
    return mount(request.param, 24 << 20)


@pytest.fixture
def disk(mount: Callable[..., Path]) -> Path:
    """A separate file system on a loop device, which can be frozen."""
    return mount("ext4", 256 << 20)


@pytest.fixture(params=["rw", "data=journal"], ids=["direct", "cached"])
def dying_disk(request: pytest.FixtureRequest, mount: Callable[..., Path]) -> Path:
    """An ext4 with free room, on a device that fails once 24 MiB are used.

    With ``data=journal`` it has no direct I/O, so writes go through the page cache.
    """
    return mount("ext4", 256 << 20, request.param, within=mount("tmpfs", 24 << 20))


@pytest.fixture
def slow_disk(mount: Callable[..., Path]) -> Iterator[Callable[[int, int], tuple[Path, Path]]]:
    """``slow_disk(size, rate)`` returns the folder of a disk and the ``cgroup.procs`` of a group.

    The processes of this control group write to the disk with ``rate`` bytes a second. The disk is
    mounted with sync, so that these processes themselves wait for their writes.
    """
    groups: list[Path] = []

    def made(size: int, rate: int) -> tuple[Path, Path]:
        folder = mount("ext4", size, "sync")
        device = os.stat(folder).st_dev
        number = f"{os.major(device)}:{os.minor(device)}"
        v1, v2 = Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup")
        if (v1 / "blkio.throttle.write_bps_device").exists():
            root, file, rule = v1, "blkio.throttle.write_bps_device", f"{number} {rate}"
        elif (v2 / "cgroup.controllers").exists():
            root, file, rule = v2, "io.max", f"{number} wbps={rate}"
        else:
            pytest.skip("no control group limits the rate of a disk here")
        group = root / f"strap-faults-{os.getpid()}-{len(groups)}"
        try:
            if root is v2:
                (v2 / "cgroup.subtree_control").write_text("+io")
            group.mkdir()
            groups.append(group)
            (group / file).write_text(rule)
        except OSError as error:
            pytest.skip(f"cannot limit the rate of a disk: {error}")
        return folder, group / "cgroup.procs"

    yield made
    for group in groups:
        for pid in (group / "cgroup.procs").read_text().split():
            (group.parent / "cgroup.procs").write_text(pid)
        group.rmdir()
