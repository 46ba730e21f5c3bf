"""Captures with probes: one table and one figure show the capture and the machine together."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from llm_instrumentation import InstrumentationConfig, InstrumentationFramework
from llm_instrumentation.cli import main as strap
from llm_instrumentation.core.config import PROBES as CONFIG_PROBES
from llm_instrumentation.errors import (
    CorruptError,
    NotFoundError,
    StrapPermissionError,
    UnsupportedError,
)
from llm_instrumentation.probes import (
    BlockProbe,
    SystemProbe,
    plot_timeline,
    read_snapshots,
    timeline,
)
from llm_instrumentation.probes.capture import PROBES, snapshot_path
from llm_instrumentation.probes.correlation import _pressure
from llm_instrumentation.probes.disks import disk_of
from llm_instrumentation.probes.throttling import cpu_throttled_s


@pytest.fixture
def privileged() -> None:
    try:
        BlockProbe().start().stop()
        SystemProbe().start().stop()
    except (StrapPermissionError, UnsupportedError) as error:
        pytest.skip(str(error))


def captured(path: Path, config: InstrumentationConfig, steps: int = 20) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
    framework = InstrumentationFramework(config)
    framework.instrument_model(model)
    with framework.capture_activations(path):
        for _ in range(steps):
            model(torch.ones(8, 64))


@pytest.mark.usefixtures("privileged")
def test_a_timeline_has_the_capture_and_the_machine(tmp_path):
    path = tmp_path / "run.stream"
    captured(path, InstrumentationConfig.balanced().with_probes(interval_s=0.05))
    table = timeline(path)
    assert table.index.name == "time_s" and table.index.is_monotonic_increasing
    raw_mb = (table["captured_mb_s"] * table["interval_s"]).sum()
    assert raw_mb == pytest.approx(20 * 3 * 8 * 64 * 4 / 1e6)  # two modules and their container
    assert (table["file_mb_s"] * table["interval_s"]).sum() * 1e6 == pytest.approx(
        path.stat().st_size
    )
    assert table["cpu_share"].sum() > 0  # the rows of this process
    assert table["disk_requests_s"].notna().all()
    assert set(table["bottleneck"]) <= {"", "disk", "cpu"}
    figure = plot_timeline(table)
    assert [len(axes.patches) > 0 for axes in figure.axes][:2] == [True, True]
    figure.savefig(tmp_path / "timeline.png")
    longer = table.iloc[[0] * 4].set_axis([1.0, 2.0, 3.0, 3.001])
    longer.loc[3.001, ["interval_s", "disk_mb_s"]] = 0.001, 1e9
    assert plot_timeline(longer).axes[0].get_ylim()[1] < 1e8  # its rate says little
    # The files have the format of the scripts, and can be analysed in the same way.
    (*_, block) = read_snapshots(snapshot_path(path, "block"))
    (*_, system) = read_snapshots(snapshot_path(path, "system"))
    assert {"latency_histogram", "inflight", "operations"} <= block.keys()
    assert system["processes"].keys() >= {str(os.getpid())}


@pytest.mark.usefixtures("privileged")
def test_the_command_tells_the_bottleneck_of_a_capture(tmp_path, capsys):
    path = tmp_path / "run.stream"
    captured(path, InstrumentationConfig.balanced().with_probes(interval_s=0.05))
    figure, table = tmp_path / "timeline.svg", tmp_path / "timeline.csv"

    def command(*arguments: object) -> int:
        with pytest.raises(SystemExit) as ended:
            strap(["timeline", *map(str, arguments)])
        return int(ended.value.code or 0)

    assert command(path, "--figure", figure, "--table", table) == 0
    assert "held up by the disk: " in capsys.readouterr().out
    assert "<svg" in figure.read_text()
    assert len(table.read_text().splitlines()) == len(timeline(path)) + 1
    assert command(path, "--figure", tmp_path / "timeline.doc") == 2
    assert command(tmp_path / "other.stream") == 5
    assert "with_probes" in capsys.readouterr().err


@pytest.mark.usefixtures("privileged")
@pytest.mark.parametrize(
    ("seconds", "stalled_s", "shares"),
    [
        ([1.0, 1.0], [0.5, 0.25], [0.5, 0.25]),
        ([0.5] * 5, [0, 0, 0, 1.8, 0], [0.9, 0.9, 0.9, 0.9, 0]),
        ([0.5] * 6, [0, 0, 0, 0, 0, 1.0], [0, 0, 0.5, 0.5, 0.5, 0.5]),
        ([0.5] * 4, [0.5, 0, 0.5, 0], [1, 0.5, 0.5, 0]),
        ([0.25, 0.25], [1.9, 0], [1, 0]),  # most of it was before the capture
        ([4.0, 4.0], [0, 4.0], [0, 1]),
        ([0.5] * 3, [0, np.nan, 0.5], [0, np.nan, 1]),
    ],
)
def test_pressure_is_of_the_intervals_that_the_kernel_counts_together(seconds, stalled_s, shares):
    found = _pressure(np.array(stalled_s, float), np.array(seconds))
    np.testing.assert_allclose(found, shares)


def test_one_probe_is_enough(tmp_path):
    """A timeline of the system probe alone has no values for the disk."""
    path = tmp_path / "run.stream"
    captured(path, InstrumentationConfig.balanced().with_probes("system"))
    table = timeline(path)
    assert table["disk_mb_s"].isna().all() and table["cpu_share"].notna().all()
    assert not snapshot_path(path, "block").exists()
    plot_timeline(path)


@pytest.mark.usefixtures("privileged")
def test_snapshots_of_an_earlier_capture_do_not_stay(tmp_path):
    path = tmp_path / "run.stream"
    captured(path, InstrumentationConfig.balanced().with_probes())
    captured(path, InstrumentationConfig.balanced())
    assert [file.name for file in tmp_path.glob("*.jsonl")] == []
    with pytest.raises(NotFoundError, match="with_probes"):
        timeline(path)


@pytest.mark.usefixtures("privileged")
def test_a_resumed_capture_goes_on_in_the_same_files(tmp_path):
    path = tmp_path / "run.stream"
    framework = InstrumentationFramework(InstrumentationConfig.balanced().with_probes())
    model = torch.nn.Linear(64, 64)
    framework.instrument_model(model)
    for resume in (False, True):
        with framework.capture_activations(
            path, track_per_token=True, resume_from_checkpoint=resume
        ):
            model(torch.ones(8, 64))
    table = timeline(path)
    captured_mb = (table["captured_mb_s"] * table["interval_s"]).sum()
    assert captured_mb == pytest.approx(2 * 8 * 64 * 4 / 1e6)  # each session counts from 0


@pytest.mark.usefixtures("privileged")
def test_snapshots_that_cannot_be_written_do_not_end_the_capture(tmp_path):
    path = tmp_path / "run.stream"
    model = torch.nn.Linear(64, 64)
    config = InstrumentationConfig.balanced().with_probes("block", interval_s=0.05)
    framework = InstrumentationFramework(config)
    framework.instrument_model(model)
    with framework.capture_activations(path, track_per_token=True):
        model(torch.ones(8, 64))
    snapshot_path(path, "block").unlink()
    os.symlink("/dev/full", snapshot_path(path, "block"))
    with (
        pytest.warns(
            RuntimeWarning, match=r"the snapshots in .*block.jsonl end here.* No space left"
        ),
        framework.capture_activations(path, track_per_token=True, resume_from_checkpoint=True),
    ):
        model(torch.ones(8, 64))
    assert framework.stats().tensors == 1


def test_files_of_something_else_are_no_timeline(tmp_path):
    path = tmp_path / "run.stream"
    with pytest.raises(NotFoundError, match="with_probes"):
        timeline(path)
    snapshot_path(path, "capture").touch()
    with pytest.raises(NotFoundError, match="no snapshot"):
        timeline(path)
    snapshot_path(path, "capture").write_text('{"timestamp": 1.0}\n')
    with pytest.raises(CorruptError, match="interval_s"):
        timeline(path)


def test_snapshots_that_no_capture_left_stay(tmp_path):
    path = tmp_path / "run.stream"
    snapshot_path(path, "block").write_text('{"timestamp": 1.0}\n')  # written by strap-probe
    captured(path, InstrumentationConfig.balanced())
    assert snapshot_path(path, "block").exists()


def test_probes_of_a_configuration():
    """A configuration names known probes and a positive interval."""
    config = InstrumentationConfig.balanced()
    assert config.probes == ()
    assert set(config.with_probes().probes) == set(CONFIG_PROBES) == set(PROBES)
    assert config.with_probes("block", 0.5).probes == ("block",)
    assert config.with_probes(()).probes == ()
    for bad in ("disk", ["block", "disk"], 3):
        with pytest.raises(ValueError, match="probes"):
            config.with_probes(bad)
    for interval in (0, -1.0, float("nan"), 1e10):
        with pytest.raises(ValueError, match="probe_interval_s"):
            config.with_probes(interval_s=interval)


def test_disk_of_a_file(tmp_path):
    """The disk of a file is found, also before the file exists."""
    disk = disk_of(tmp_path / "not there yet")
    listed = {
        line.split()[-1] for line in Path("/proc/partitions").read_text().splitlines() if line
    }
    if disk is None:
        pytest.skip("the file system has no disk of its own")
    assert disk.name in listed
    assert disk_of("/proc/self/stat") is None


@pytest.mark.parametrize(
    ("line", "file", "text", "seconds"),
    [
        ("0::/a/b", "a/b/cpu.stat", "usage_usec 9\nthrottled_usec 1500000\n", 1.5),
        ("3:cpu,cpuacct:/a", "cpu,cpuacct/a/cpu.stat", "throttled_time 2500000000\n", 2.5),
        ("1:cpu:/of/the/host", "cpu/cpu.stat", "nr_throttled 1\nthrottled_time 7\n", 7e-9),
        ("0::/a", "a/cpu.stat", "usage_usec 9\n", None),
        ("2:memory:/a", "a/cpu.stat", "throttled_usec 9\n", None),
    ],
)
def test_cpu_throttling_of_a_control_group(tmp_path, line, file, text, seconds):
    (tmp_path / "cgroup").write_text(f"9:memory:/m\n{line}\n")
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    assert cpu_throttled_s(tmp_path / "cgroup", tmp_path) == seconds


def test_cpu_throttling_of_this_process():
    before = cpu_throttled_s()
    assert before is None or 0 <= before <= cpu_throttled_s()
