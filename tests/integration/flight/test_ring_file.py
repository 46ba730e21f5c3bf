"""The steps of a flight recorder lie in a file, and are read from it as a capture."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, for_request
from llm_instrumentation.analysis.salvage import salvage_ring
from llm_instrumentation.cli.exit_codes import ExitCode
from llm_instrumentation.cli.strap import STRAP
from llm_instrumentation.errors import CorruptError, InvalidArgumentError
from llm_instrumentation.flight import flight_recorder
from torch import nn

CONFIG = InstrumentationConfig.fast_capture().with_float32()


def died(ring, tmp_path):
    """A copy of the file: what a kill would leave now."""
    return shutil.copy(ring, tmp_path / "left")


@pytest.fixture
def strap(capsys):
    def run(*arguments):
        code = STRAP.run("strap", [str(argument) for argument in arguments])
        return code, capsys.readouterr()

    return run


def test_what_is_salvaged_is_what_a_dump_has(tmp_path):
    torch.manual_seed(0)
    model, ring = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.LSTM(8, 5)), tmp_path / "ring"
    with torch.no_grad(), flight_recorder(
        model, tmp_path / "run", memory_gb=0.01, config=CONFIG, ring_file=ring
    ) as recorder:  # fmt: skip
        for number in range(5):
            with for_request(f"request {number}"):
                model(torch.randn(3, 8))
        report = salvage_ring(died(ring, tmp_path), tmp_path / "last.stream")
        dump = recorder.dump()
    assert [(step.step, step.whole) for step in report.steps] == [(n, True) for n in range(5)]
    assert report.pid == os.getpid() and not ring.exists()
    with ActivationReader(dump) as dumped, ActivationReader(tmp_path / "last.stream") as last:
        assert len(last) == len(dumped) == report.packets == 5 * 8
        for got, wanted in zip(last, dumped, strict=True):
            assert (got.name, got.step, got.call, got.request, got.shape) == (
                wanted.name, wanted.step, wanted.call, wanted.request, wanted.shape,
            )  # fmt: skip
            assert torch.equal(got.to_torch(), wanted.to_torch())


def test_the_step_that_runs_is_told(tmp_path, strap):
    ring, left = tmp_path / "ring", []
    model = nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity())
    model[2].register_forward_pre_hook(
        lambda _, given: left.append(died(ring, tmp_path)) if given[0][0, 0] == 6 else None
    )
    with flight_recorder(
        model, tmp_path / "run", memory_gb=0.01, config=CONFIG, ring_file=ring
    ):  # fmt: skip
        for number in range(7):
            model(torch.full((2, 9000), float(number)))
    out = tmp_path / "last.stream"
    code, told = strap("salvage", "ring", left[0], out)
    assert code == 0 and "step 6 is not whole: 2 packets, the model had not ended it" in told.out
    assert "6 whole steps, 0 to 5" in told.out
    with ActivationReader(out, warn=False) as reader:
        assert {one.name for one in reader.select(steps=6)} == {"0", "1"}
        for one in reader:
            assert torch.equal(one.to_torch(), torch.full((2, 9000), float(one.step)))
    code, told = strap("salvage", "ring", left[0], out, "--json", "--overwrite")
    report = json.loads(told.out)
    assert report["packets"] == sum(step["packets"] for step in report["steps"])
    assert [step["step"] for step in report["steps"] if not step["whole"]] == [6]


def test_refusals(tmp_path, strap):
    ring = tmp_path / "ring"
    with pytest.raises(CorruptError, match="is no ring file"):
        other = tmp_path / "other"
        other.write_bytes(b"a text" * 1000)
        salvage_ring(other, tmp_path / "a.stream")
    with flight_recorder(nn.Identity(), tmp_path / "run", memory_gb=0.01, ring_file=ring):
        assert strap("salvage", "ring", ring, tmp_path / "a.stream")[0] == ExitCode.FAILED
        left = died(ring, tmp_path)
    assert salvage_ring(left, tmp_path / "a.stream").steps == ()  # no step had begun
    with pytest.raises(InvalidArgumentError, match="exists"):
        salvage_ring(left, tmp_path / "a.stream")
    with pytest.raises(InvalidArgumentError, match="download it"):
        salvage_ring("s3://bucket/ring", tmp_path / "b.stream")
    for arguments in (["ring", left], ["ring", left, "a", "--out", "b"], ["a", left, "b"]):
        code, told = strap("salvage", *arguments)
        assert code == ExitCode.USAGE and "give STREAM, or ring FILE OUT" in told.err
    assert strap("salvage", "ring", tmp_path / "no", "c.stream")[0] == ExitCode.NOT_FOUND
    assert strap("salvage", "ring", other, tmp_path / "c.stream")[0] == ExitCode.USAGE
    assert not (tmp_path / "c.stream").exists()
