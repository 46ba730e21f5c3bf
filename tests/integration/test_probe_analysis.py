"""The script that analyses snapshots: its summary, its figures, its exit codes."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import prepared
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "analyze_tracepoints.py"
FIGURES = ("latency_hist", "queue_depth", "requests", "latency_percentiles")
BEGIN = 1_700_000_000.0  # 2023-11-14T22:13:20Z


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [prepared.python(prepared.TORCH), str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_without_the_package_the_script_says_how_to_run_it():
    command = [sys.executable, "-I", "-S", SCRIPT, "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"{sys.executable} has no llm_instrumentation: run this with the P"
    )
    assert "Traceback" not in done.stderr


def snapshot(window: int, devices: dict[str, tuple[dict[int, int], int]]) -> dict:
    """A snapshot as llm_instrumentation 1.3.1 writes it.

    `devices` maps names to the latency histogram as {slot: count}, and the queue depth.
    """
    histograms = [
        {
            "device_id": number,
            "device_name": name,
            "total": sum(slots.values()),
            "buckets": [
                {"slot": s, "count": c, "bucket_low": 2**s, "bucket_high": 2 ** (s + 1) - 1}
                for s, c in slots.items()
            ],
        }
        for number, (name, (slots, _)) in enumerate(devices.items())
        if slots
    ]
    inflight = [
        {"device_id": number, "device_name": name, "count": depth}
        for number, (name, (_, depth)) in enumerate(devices.items())
    ]
    return {
        "timestamp": BEGIN + 5.0 * (window + 1),
        "iso_timestamp": "",
        "interval_s": 5.0,
        "latency_histogram": histograms,
        "inflight": inflight,
    }


def metrics_line(window: int, total_us: int) -> dict:
    psi = {"avg10": 0.0, "avg60": 0.0, "avg300": 0.0, "total": total_us}
    return {
        "timestamp": BEGIN + 5.0 * (window + 1) + 0.2,
        "iso_timestamp": "",
        "interval_s": 5.0,
        "off_cpu_ns": {str(pid): pid * 1_000_000 for pid in range(1, 9)},
        "page_faults": {"8": 3},
        "pressure": {name: {"some": psi, "full": psi} for name in ("cpu", "io", "memory")},
    }


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twenty windows, of which the sixteenth is slow, with a gap before the eleventh."""
    lines = []
    for window in range(20):
        slots = {5: 90 + window, 6: 10} if window != 15 else {5: 50, 6: 50, 14: 25}
        devices = {"cciss!c0d0": (slots, 40 if window == 15 else 1), "sda": ({}, 0)}
        lines.append(snapshot(window if window < 10 else window + 6, devices))
    return write(tmp_path / "trace.jsonl", lines)


def size(png: Path) -> tuple[int, int]:
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_summary_and_figures(trace, tmp_path):
    """The script prints a summary, and draws figures of each device that had requests."""
    out = tmp_path / "new" / "figures"
    done = analyze("--input", trace, "--output-dir", out, "--percentiles", "50,99.9")
    assert (done.returncode, done.stderr) == (0, "")
    requests = sum(100 + window for window in range(20)) - 115 + 125
    for line in (
        rf"^cciss!c0d0$\n  requests +{requests} in 20 windows, 100\.0 s$",
        r"^  mean latency +about \d+ us$",
        r"^  p50 +50\.2 us$",
        r"^  p99\.9 +31130 us$",
        r"^  peak queue depth +40, at 2023-11-14T22:15:10\.000Z$",
        r"^  anomalous windows +1 of 20 with requests \(p99 above median \+ 3 sigma.*\)$",
        r"^    2023-11-14T22:15:10\.000Z  p99 \d{5} us, 125 requests$",
        r"^sda$\n  requests +0 in 20 windows",
    ):
        assert re.search(line, done.stdout, re.MULTILINE), (line, done.stdout)
    assert {path.name for path in out.iterdir()} == {f"cciss_c0d0_{name}.png" for name in FIGURES}
    for path in out.iterdir():
        assert size(path) == (1080, 540)
        assert path.stat().st_size > 10_000


def test_long_trace(tmp_path):
    """There are more windows than a figure has columns, and more outliers than are shown."""
    lines = [snapshot(w, {"vda": ({14 if w % 40 == 9 else 5: 10}, w % 7)}) for w in range(1000)]
    out = tmp_path / "out"
    done = analyze("--input", write(tmp_path / "long", lines), "--output-dir", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^  anomalous windows +25 of 1000 with requests", done.stdout, re.MULTILINE)
    assert done.stdout.count("  p99 31949 us, 10 requests") == 20
    assert "and 5 with a lower p99" in done.stdout
    assert len(list(out.iterdir())) == 4


def test_a_torn_line_is_reported(trace, tmp_path):
    with trace.open("a") as file:
        file.write('{"timestamp": 17')
    done = analyze("--input", trace, "--output-dir", tmp_path / "out")
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert "1 lines are no snapshots, the first of them line 21" in done.stderr


def test_losses_are_reported(tmp_path):
    one = {**snapshot(0, {"vda": ({5: 1}, 0)}), "losses": {"missed": 3, "expired": 0}}
    done = analyze("--input", write(tmp_path / "one", [one]), "--output-dir", tmp_path)
    assert "not followed, or not to their end: missed 3\n" in done.stdout


def test_device_that_completes_nothing_shows_its_queue(tmp_path):
    stuck = [snapshot(window, {"vda": ({}, 12)}) for window in range(3)]
    out = tmp_path / "out"
    done = analyze("--input", write(tmp_path / "stuck", stuck), "--output-dir", out)
    assert done.returncode == 0
    assert "no requests in 3 windows" in done.stdout
    assert [path.name for path in out.iterdir()] == ["vda_queue_depth.png"]


@pytest.mark.parametrize(
    ("lines", "says"),
    [([], "no snapshots"), ([snapshot(0, {"vda": ({}, 0)})], "no requests in 1 windows")],
)
def test_a_trace_without_requests_has_no_figures(lines, says, tmp_path):
    out = tmp_path / "out"
    done = analyze("--input", write(tmp_path / "nothing", lines), "--output-dir", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert says in done.stdout
    assert list(out.iterdir()) == []


# ---- system metrics ----


def test_system_metrics(tmp_path):
    """The script correlates each system metric with the latency."""
    # The latency doubles with each window, and so does the growth of the pressure.
    trace = [snapshot(window, {"vda": ({4 + window: 10}, 0)}) for window in range(12)]
    metrics = [metrics_line(window, 1000 * 2**window) for window in range(12)]
    done = analyze(
        "--input", write(tmp_path / "trace", trace),
        "--system-metrics", write(tmp_path / "metrics", metrics),
        "--output-dir", tmp_path, "--top", "2",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "Spearman's rho with the mean latency" in done.stdout
    assert re.search(
        r"^    io pressure \(some, growth of total\) +rho \+1\.00, n = 11, p = 0\.\d+$",
        done.stdout, re.M,
    )  # fmt: skip
    flat = r"^    off-CPU time +none, it or the latency does not vary, n = 12$"
    assert re.search(flat, done.stdout, re.MULTILINE)
    assert "it is no cause" in done.stdout
    table = done.stdout.split("2 of 8 processes\n")[1].splitlines()
    assert [line.split() for line in table[1:3]] == [["8", "0.096", "36"], ["7", "0.084", "0"]]


def test_too_few_windows_for_a_correlation(tmp_path):
    trace = [snapshot(window, {"vda": ({4 + window: 10}, 0)}) for window in range(8)]
    metrics = [metrics_line(window, 1000 * window) for window in range(8)]
    done = analyze(
        "--input", write(tmp_path / "trace", trace),
        "--system-metrics", write(tmp_path / "metrics", metrics), "--output-dir", tmp_path,
    )  # fmt: skip
    assert "too few windows, n = 7 of 8\n" in done.stdout
    assert "5 of 8 processes" in done.stdout


# ---- the report ----


class Page(HTMLParser):
    """The references of a page, the cells of its tables, and its figures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.refers: list[str] = []
        self.cells: list[str] = []
        self.figures: list[str] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.refers += [given[name] for name in ("src", "href", "xlink:href") if name in given]
        self._cell = tag == "td"
        if tag == "svg":
            self.figures.append(given["aria-label"])
        assert tag != "script"

    def handle_data(self, data: str) -> None:
        if self._cell:
            self.cells.append(data)
            self._cell = False


def test_report(trace, tmp_path):
    """The HTML report needs no other file, and has the figures and tables of the summary."""
    path, metrics = tmp_path / "report.html", [metrics_line(w, 1000 * 2**w) for w in range(20)]
    done = analyze(
        "--input", trace, "--output-dir", tmp_path / "out", "--html", path, "--top", "3",
        "--system-metrics", write(tmp_path / "metrics", metrics),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"report in {path}\n")
    text = path.read_text()
    page = Page(text)
    assert all(one.startswith(("#", "data:image/png")) for one in page.refers)
    assert any(one.startswith("data:image/png") for one in page.refers)  # the heat map
    assert "prefers-color-scheme: dark" in text
    assert page.figures == [
        f"{what}, cciss!c0d0"
        for what in (
            "Heat map of requests by latency and time", "Requests in flight at each snapshot",
            "Requests completed per second over time", "Percentiles of latency over time",
        )
    ]  # fmt: skip
    assert {"cciss!c0d0", "sda", "io pressure (some, growth of total)", "8", "7", "6"} <= {
        *page.cells
    }
    assert "An association is no cause." in text


def test_report_of_nothing(tmp_path):
    done = analyze(
        "--input", write(tmp_path / "nothing", []), "--output-dir", tmp_path / "out",
        "--html", tmp_path / "report.html",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert Page((tmp_path / "report.html").read_text()).figures == []


def test_names_in_the_report_stay_names(tmp_path):
    lines = [{**snapshot(0, {'<b>&"$x': ({5: 1}, 1)}), "losses": {"<i>": 1}}]
    done = analyze(
        "--input", write(tmp_path / "trace", lines), "--output-dir", tmp_path / "out",
        "--html", tmp_path / "report.html",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "report.html").read_text()
    assert "<b>&" not in text and "<i>" not in text.partition("</header>")[2]
    assert '<b>&"$x' in Page(text).cells[0]


def test_report_that_cannot_be_written(trace, tmp_path):
    out = tmp_path / "out"
    done = analyze("--input", trace, "--output-dir", out, "--html", trace / "report.html")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "trace.jsonl/report.html" in done.stderr


# ---- errors ----


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--input", "missing.jsonl"], 1, "missing.jsonl"),
        (["--input", "."], 1, "Is a directory"),
        (["--input", "notes.txt"], 2, "none of its 2 lines is a snapshot"),
        (["--input", "bare.jsonl"], 2, "snapshot 1: no field 'interval_s'"),
        (["--percentiles", "50,101"], 2, "--percentiles 50,101: give numbers from 0 to 100"),
        (["--percentiles", "-1"], 2, "--percentiles -1: give numbers from 0 to 100"),
        (["--percentiles", "nan"], 2, "from 0 to 100"),
        (["--percentiles", ""], 2, "give numbers, as 50,90,99"),
        (["--percentiles", "median"], 2, "give numbers, as 50,90,99"),
        (["--top", "0"], 2, "--top 0: give 1 or more"),
        (["--top", "many"], 2, "--top: invalid int value: 'many'"),
        (["--nosuch"], 2, "--nosuch"),
        (["--system-metrics", "missing.jsonl"], 1, "missing.jsonl"),
        (["--system-metrics", "trace.jsonl"], 2, "system metrics, line 1: it is of block devices"),
        (["--output-dir", "notes.txt"], 1, "notes.txt"),
        (["--html", "."], 2, "--html .: it would be replaced"),
    ],
)
def test_errors_of_the_script(arguments, code, says, trace, tmp_path, monkeypatch):
    """Each error is one line that names the fault, with the documented exit code."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("one\ntwo\n")
    Path("bare.jsonl").write_text('{"timestamp": 1}\n')
    # If a flag comes twice, the last one counts.
    done = analyze("--input", trace, "--output-dir", "out", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert says in done.stderr
    assert done.stderr.count("\n") == 1
