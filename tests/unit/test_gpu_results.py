"""What benchmarks/gpu reads of the tools' output, and the page that it makes of the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from gpu import install, page, prepare, run  # noqa: E402
from gpu.correctness import counted  # noqa: E402
from gpu.ncu import NcuError, metrics_by_range  # noqa: E402
from gpu.profiled import step_of  # noqa: E402
from gpu.sanitizers import verdict  # noqa: E402

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")

# ---- ncu -----------------------------------------------------------------------------

PLACE = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
RAW = f"""\
==PROF== Connected to process 1042 (/opt/venv/bin/python3.12)
==PROF== Profiling "nvjet_tst_256x128" - 0: 0%....50%....100% - 1 pass
==PROF== Disconnected from process 1042
"ID","Process ID","{PLACE}","Kernel Name","Block Size","dram__bytes_read.sum","dram__bytes_write.sum"
"","","","","","byte","byte"
"0","1042","1042  ""<default domain>:matrix product:none:none:none:none:none:none"" ","nvjet_tst_256x128","(384, 1, 1)","201,326,720.00","1500"
"1","1042","1042  ""<default domain>:attention, one token:none:none:none:none:none:none"" ","flash_fwd_splitkv","(128, 1, 1)","1000","0"
"2","1042","1042  ""<default domain>:attention, one token:none:none:none:none:none:none"" ","combine","(128, 1, 1)","24","8000"
"3","1042","","a kernel outside of all ranges","(128, 1, 1)","77","77"
"""  # noqa: E501


def test_metrics_are_added_up_over_the_kernels_of_a_range():
    names = ["matrix product", "attention, one token", "copy"]
    assert metrics_by_range(RAW, names, METRICS) == {
        "matrix product": {METRICS[0]: 201_326_720, METRICS[1]: 1500, "kernels": 1},
        "attention, one token": {METRICS[0]: 1024, METRICS[1]: 8000, "kernels": 2},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== The user does not have permission to access GPU counters", "permission"),
        ("", "no table"),
        (RAW.replace("dram__bytes_write.sum", "other"), "among the columns"),
        (RAW.replace("Push/Pop_Range", "Range"), "among the columns"),
        (RAW.replace('"byte","byte"', '"byte","Kbyte"'), "not bytes"),
    ],
)  # fmt: skip
def test_output_of_ncu_without_figures_is_refused(text, message):
    with pytest.raises(NcuError, match=message):
        metrics_by_range(text, ["matrix product"], METRICS)


# ---- sanitizers and tests --------------------------------------------------------------

ENDED = "the program has ended\n"


@pytest.mark.parametrize(
    ("tool", "text", "errors"),
    [
        ("memcheck", ENDED + "========= ERROR SUMMARY: 0 errors\n", 0),
        ("memcheck", ENDED + "========= ERROR SUMMARY: 1 error\n", 1),
        ("memcheck", "========= ERROR SUMMARY: 12 errors\n", 12),
        ("memcheck", ENDED, None),  # the sanitizer switched itself off
        ("memcheck", "========= ERROR SUMMARY: 0 errors\n", None),  # the program did not end
        ("memcheck", "========= Error: Device not supported\n", None),
        ("streams", ENDED, 0),
        ("streams", "CSAN detected a possible data race on tensor with data pointer 1", 1),
        ("streams", "", None),
    ],
)
def test_a_sanitizer_that_has_not_looked_has_found_nothing_out(tool, text, errors):
    assert verdict(tool, text)["errors"] == errors


def test_outcomes_of_tests_are_counted_while_they_run():
    alone = "tests/gpu/a.py::b[torch.int8-1] PASSED [ 3%]\ntests/gpu/a.py::c FAILED [ 6%]\n"
    assert counted(alone + "tests/gpu/a.py::d ") == {
        "tests": 2, "passed": 1, "skipped": 0, "failed": 1, "failures": ["tests/gpu/a.py::c"],
    }  # fmt: skip
    several = (
        "tests/gpu/a.py::b[torch.int8-1] \n[gw1] [  3%] PASSED tests/gpu/a.py::b[torch.int8-1] \n"
        "[gw0] [100%] SKIPPED tests/gpu/a.py::c \nFAILED tests/gpu/a.py::d - in the summary\n"
    )
    found = counted(several)
    assert (found["tests"], found["passed"], found["skipped"]) == (2, 1, 1)


# ---- the profiler ----------------------------------------------------------------------


def event(name, cat, ts, dur, tid, **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_waits_of_a_step_are_those_of_its_thread(tmp_path):
    """Also what the step launched and the device ran later."""
    path = tmp_path / "trace.json"
    events = [
        event("the step", "user_annotation", "100.0", 50, 11),
        event("the step", "gpu_user_annotation", 100, 50, 7),
        event("cudaLaunchKernel", "cuda_runtime", 110, 2, 11, correlation=1),
        event("cudaMemcpyAsync", "cuda_runtime", 120, 2, 11, correlation=2),
        event("cudaStreamSynchronize", "cuda_runtime", 125, 5, 11, correlation=3),
        event("cudaEventSynchronize", "cuda_runtime", 126, 9, 12, correlation=4),
        event("cudaDeviceSynchronize", "cuda_runtime", 160, 9, 11, correlation=5),  # later
        event("gemm", "kernel", 140, 30, 7, correlation=1),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 175, 5, 20, correlation=2, bytes=64),
        event("gemm", "kernel", 90, 3, 7, correlation=9),  # of an earlier step
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    assert step_of(path, "the step") == {
        "step_ms": 0.05, "waits": {"cudaStreamSynchronize": 1},
        "waits_of_others": {"cudaEventSynchronize": 1}, "allocations": {},
        "model_stream_ms": 0.03, "model_stream_span_ms": 0.03, "to_host_bytes": {"other": 64},
        "kernels": 1,
    }  # fmt: skip
    with pytest.raises(ValueError, match="0 blocks are named 'another'"):
        step_of(path, "another")


# ---- what is carried -------------------------------------------------------------------


def test_only_wheels_that_are_missing_are_installed(monkeypatch):
    ours, there, missing = (
        Path(f"{name}-1.0-py3-none-any.whl")
        for name in ("llm_instrumentation", "pytest", "odd_one")
    )
    assert install.wanted([ours, there, missing], rehearsal=False) == [ours, missing]
    assert install.wanted([there, missing], rehearsal=True) == [missing]
    with pytest.raises(SystemExit, match="run scripts/gpu.sh prepare first"):
        install.wanted([there], rehearsal=False)


def test_the_checkout_leaves_room_for_the_wheels():
    """64 MiB may be carried, and the wheels take their part of them."""
    if subprocess.run(["git", "status"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("this is no checkout")
    assert prepare.carried()["the checkout"] < 44 << 20


# ---- a run -----------------------------------------------------------------------------


def test_a_stage_that_hangs_is_stopped_and_its_results_stay(tmp_path, monkeypatch):
    """The results of a stage are in the folder while it runs. Its own processes end with it."""
    package = tmp_path / "gpu"
    package.mkdir()
    (package / "__init__.py").write_text("")
    child = tmp_path / "child"
    (package / "hangs.py").write_text(f"""
import subprocess, sys, time
part = sys.argv[sys.argv.index("--part") + 1]
process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(child)!r}, "w").write(str(process.pid))
open(part, "w").write('{{"found": 3}}')
time.sleep(600)
""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "out"
    out.mkdir()
    found = run.Run(out, rehearsal=True)
    monkeypatch.setattr(page, "SHOWN", {"hangs": lambda result: [f"found {result['found']}"]})
    begun = time.monotonic()
    with open(out / "log.txt", "w") as log:
        found.stage(run.Planned("hangs", "Hangs", 6), 6, tmp_path, log)
    assert time.monotonic() - begun < 60
    kept = json.loads((out / "results.json").read_text())["stages"]["hangs"]
    assert (kept["state"], kept["result"]) == ("stopped", {"found": 3})
    assert "found 3" in (out / "results.md").read_text()
    with pytest.raises(ProcessLookupError):
        for _ in range(600):
            os.kill(int(child.read_text()), 0)
            time.sleep(0.1)


# ---- the page --------------------------------------------------------------------------


def test_the_section_of_the_page_is_that_of_the_results():
    results = page.RESULTS
    found = json.loads(results.read_text()) if results.exists() else None
    text = page.PAGE.read_text()
    assert page.with_section(text, page.section(found)) == text
    if found is None:
        assert "Nothing of this has run on a GPU yet" in text


def test_a_rehearsal_is_no_result():
    assert page.section({"rehearsal": True}) == page.section(None)


def test_speeds_are_shares_of_the_model_alone():
    def one(kind, modules, place, codec, calls, whole, raw):
        about = {"kind": kind, "modules": modules, "place": place, "codec": codec}
        load = {"batch": 1, "prompt": 90, "new": 10}
        return {**about, **load, "prompt_s": calls / 4, "tokens_s": calls * 3 / 4,
                "whole_s": whole, "raw_bytes": raw}  # fmt: skip

    result = {
        "model": {"parameters": 6.7e9, "modules": 450, "layers": 32},
        "disk": "ext4", "limits": {"pinned": 50e9, "disk": 2e9, "tmpfs": 8e9},
        "runs": [
            one("alone", "", "", "", 2.0, 2.0, 0),
            one("capture", "layers", "disk", "lz4", 2.5, 4.0, 8e9),
            one("capture", "layers", "tmpfs", "none", 2.0, 2.0, 8e9),
        ],
    }  # fmt: skip
    lines = page._speed(result)[-1].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[3] == ["1 x 90 + 10", "capture layers disk lz4", "0.800", "0.800", "0.800",
                        "0.500", "80,000,000", "2.00", "0.04", "disk", "1"]  # fmt: skip
    # The disk takes 2 GB/s and the model gives 4; tmpfs takes 8, so there the model is the limit.
    assert cells[4][-2] == "the model"
