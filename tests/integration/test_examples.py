"""The programs in examples/ run whole, and print what their pages promise."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import prepared
import pytest
from gguf_model import write_llama
from llm_instrumentation import ActivationReader
from llm_instrumentation.analysis.blame import blame
from llm_instrumentation.analysis.salvage import salvage_ring

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

pytestmark = pytest.mark.timeout(15 * 60)  # a busy machine takes minutes for a whole program


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT / "python")},
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def example(name: str, *arguments: str | Path, cwd: Path) -> str:
    return prepared.run(EXAMPLES / name, *arguments, cwd=cwd)


def test_the_demo(tmp_path):
    said = example("basic_usage.py", "--repeats", "1", cwd=tmp_path)
    assert "bit for bit" in said
    assert "packets a token" in said


def test_an_autoencoder(tmp_path):
    said = example("sparse_autoencoder.py", "--quick", "--out", tmp_path / "sae", cwd=tmp_path)
    assert re.search(r"explained variance +0\.\d{3}", said) and "cross-entropy score" in said
    assert re.search(r"^feature \d+, on \d+\.\d% of the bytes, promotes '", said, re.MULTILINE)
    for picture in ("loss.png", "feature.png"):
        assert (tmp_path / "sae" / picture).stat().st_size > 1000


def test_a_killed_capture_goes_on(tmp_path):
    said = example("tokens_and_resume.py", cwd=tmp_path)
    assert "wrote 14 tokens and ended by signal 9" in said
    assert "its last checkpoint had 12 tokens" in said
    assert "24 tokens, the same as without the break: True" in said
    assert re.search(r"^   12  '.+?' +\(1, 21, 64\)", said, re.MULTILINE), "the first resumed step"


def test_the_layer_where_dtypes_part(tmp_path):
    said = example("compare_dtypes.py", cwd=tmp_path)
    assert "bfloat16: all 114 layers are within the tolerance of their types" in said
    assert "broken:   parts at encoder.layer.3.intermediate.dense" in said


def test_the_layer_that_broke_a_training(tmp_path):
    said = example("flight_training.py", "--output-dir", tmp_path, cwd=tmp_path)
    assert "step 899: loss 0.0" in said and "step 999: loss nan" in said
    assert re.search(r"flight-000001 has the steps \d+ to 901:", said)
    assert "mean has nan at element 160 in step 900" in said  # of text 5, which has 32 values
    assert "made by aten.div.Tensor" in said
    lengths = re.search(r"the words of the texts: \[(.+)\]", said).group(1).split(", ")
    assert lengths.index("0") == 5 and lengths.count("0") == 1


def test_the_heads_that_repeat_a_text(tmp_path):
    said = example("induction_heads.py", "--output-dir", tmp_path, cwd=tmp_path)
    model, corrupted, circuit = map(
        float, re.search(r"model (\S+), corrupted text (\S+), circuit (\S+)", said).groups()
    )
    assert corrupted < 0 < model / 2 < circuit
    previous, induction = re.findall(r"^(a\d\.h\d) gives \d", said, re.MULTILINE)
    assert re.search(rf"^ +-\d+\.\d+  {previous}->{induction}<k>$", said, re.MULTILINE)
    before, after = map(int, re.findall(r"gives (\d+)%", said))
    assert before > 25 and after > 50  # of 23 tokens
    assert (tmp_path / "induction.html").exists()


def test_the_name_that_gets_the_letter(tmp_path):
    """The circuit reads the name that is said again, and a head looks at it."""
    said = example("indirect_object.py", "--steps", "300", "--output-dir", tmp_path, cwd=tmp_path)
    model, corrupted, circuit = map(
        float, re.search(r"model (\S+), corrupted (\S+), circuit (\S+)", said).groups()
    )
    assert corrupted < 0 < model / 2 < circuit
    edges = re.findall(r"^ +[+-]\d+\.\d+  (\S+)$", said, re.MULTILINE)
    assert all("@end" in edge and ("input@again" in edge or "logits" in edge) for edge in edges)
    one, two, again = map(int, re.findall(r"gives (\d+)% of its attention", said))
    assert again > one + two
    assert (tmp_path / "indirect_object.html").exists()


WITHOUT_CAPABILITIES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")


@pytest.mark.parametrize("user", [(), WITHOUT_CAPABILITIES], ids=["this user", "no capabilities"])
def test_the_disk_that_slows_a_model(tmp_path, user):
    if user and (os.geteuid() != 0 or shutil.which(user[0]) is None):
        pytest.skip("needs root and setpriv, to drop capabilities")
    said = run(
        *user, sys.executable, EXAMPLES / "slow_disk.py", "--seconds", "1", cwd=tmp_path,
    )  # fmt: skip
    assert re.search(r"^model waited +\d+%", said, re.MULTILINE)
    if "without probes" in said:
        assert "probes tell whether" in said or "keep up" in said
    else:
        assert not user
        assert re.search(r"\d+% of the intervals wait for the disk", said)
        assert (tmp_path / "captures" / "disk.png").stat().st_size > 1000
    assert not list((tmp_path / "captures").glob("disk.stream*[!l]"))  # it takes gigabytes


def test_the_memory_of_a_llama(tmp_path):
    said = example("memory_trace.py", cwd=tmp_path)
    table = dict(re.findall(r"^(weight|kv_cache|activation) +(.+)$", said, re.MULTILINE))
    read, written, kept = (float(number) for number in table["weight"].split())
    assert read > 40 and written == 0
    assert kept > float(table["kv_cache"].split()[2]) > float(table["activation"].split()[2])


# llama.cpp.


@pytest.mark.slow
@pytest.mark.timeout(50 * 60)
def test_llama_cpp_beside_transformers(llama_cpp, tmp_path):
    said = example("llama_cpp/side_by_side.py", "--out", tmp_path, cwd=tmp_path)
    assert "transformers writes the same tokens: True" in said
    assert "by default they part at model.layers.0.self_attn.o_proj, in step 0" in said
    assert "the exact run agrees within 1e-5: True" in said


@pytest.fixture(scope="module")
def capture(llama_cpp, tmp_path_factory) -> Path:
    """capture.cpp, built with CMake as its page says, and a model beside it."""
    folder = tmp_path_factory.mktemp("llama_cpp")
    if shutil.which("cmake") is None:
        pytest.skip("no CMake")
    prefix = folder / "prefix"
    run("make", "-C", ROOT, "install", f"VENV={sys.prefix}", f"PREFIX={prefix}", cwd=folder)
    run(
        "cmake", "-S", EXAMPLES / "llama_cpp", "-B", folder,
        f"-DCMAKE_PREFIX_PATH={prefix};{llama_cpp}", cwd=folder,
    )  # fmt: skip
    run("cmake", "--build", folder, cwd=folder)
    write_llama(folder / "tiny.gguf", width=128)
    return folder / "capture"


@pytest.mark.slow
@pytest.mark.timeout(50 * 60)
def test_llama_cpp_gives_tensors_with_strides(capture, tmp_path):
    """A view of the cache, permuted, is stored row by row: head, position, value."""
    names = "cache_v_l0 (view),cache_v_l0 (view) (permuted)"
    run(
        capture, capture.with_name("tiny.gguf"), "a.stream", "Swifts", "--new", "2", "--tensors",
        names, "--threads", "1", cwd=tmp_path,
    )  # fmt: skip
    with ActivationReader(tmp_path / "a.stream") as reader:
        # llama.cpp gives the name "cache_v_l0 (view)" to its store first, then to the view.
        whole = reader["cache_v_l0 (view)"].at(step=1, call=1).to_numpy()
        permuted = reader["cache_v_l0 (view) (permuted)"].at(step=1).to_numpy()
        assert whole.dtype == "float16" and permuted.shape[0] == 4
        assert (permuted == whole.transpose(1, 0, 2)).all()
        assert permuted[:, :11].any(axis=(0, 2)).all(), "the positions that were written"


@pytest.mark.slow
@pytest.mark.timeout(50 * 60)
def test_llama_cpp_leaves_quantised_tensors_out_and_counts_them(capture, tmp_path):
    said = run(
        capture, capture.with_name("tiny.gguf"), "a.stream", "Swifts", "--new", "3", "--tensors",
        "cache_k_l1 (view),l_out", "--cache-type", "q8_0", "--threads", "1", cwd=tmp_path,
    )  # fmt: skip
    with ActivationReader(tmp_path / "a.stream") as reader:
        assert reader.layers == ("l_out-0", "l_out-1")
        assert {(one.name, one.error) for one in reader.missing} == {
            ("cache_k_l1 (view)", "quantised: q8_0")
        }
        assert f"{len(reader.missing)} quantised ones left out" in said
        assert [one.step for one in reader["l_out-1"]] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.timeout(50 * 60)
def test_llama_cpp_with_a_file_that_is_no_model(capture, tmp_path):
    (tmp_path / "no.gguf").write_text("no model")
    done = subprocess.run(
        [capture, "no.gguf", "a.stream", "Swifts"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "no.gguf is no model that llama.cpp can load" in done.stderr


FLIGHT = (
    "--flight-recorder", "flight", "--tensors", "ffn_norm,ffn_out,l_out", "--threads", "1",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(50 * 60)
def test_a_flight_recorder_of_llama_cpp_keeps_the_step_that_broke(capture, tmp_path):
    write_llama(tmp_path / "broken.gguf", width=128, change=plant_nan)
    said = run(capture, "broken.gguf", "Swifts", *FLIGHT, "--new", "5", cwd=tmp_path)
    (dump,) = (tmp_path / "flight").glob("*.stream")  # later steps read the NaN in the cache
    assert dump.name == "dump-000001.stream"
    assert "kept 4 steps from step 1 on" in said and "1 dumps, 4 held back" in said

    first = blame(dump, progress=False).first
    assert (first.layer, first.step, first.element) == ("ffn_out-1", 0, 5)
    with ActivationReader(dump) as reader:
        assert reader.steps == (0,) and not reader.missing
        for name in ("ffn_norm-0", "ffn_out-0", "l_out-0", "ffn_norm-1"):
            assert np.isfinite(reader[name].at(step=0).to_numpy()).all(), name
        bad = np.isnan(reader["ffn_out-1"].at(step=0).to_numpy())
        assert bad[:, 5].all() and bad.sum() == len(bad), "the row of the weight, at each token"


def plant_nan(tensors: dict[str, np.ndarray]) -> None:
    tensors["blk.1.ffn_down.weight"][5, 17] = np.nan


@pytest.mark.slow
@pytest.mark.timeout(50 * 60)
def test_a_flight_recorder_of_llama_cpp_writes_nothing_in_a_healthy_run(capture, tmp_path):
    said = run(
        capture, capture.with_name("tiny.gguf"), "Swifts", *FLIGHT, "--new", "5", "--steps", "3",
        "--ring-file", "ring", cwd=tmp_path,
    )  # fmt: skip
    assert "kept 3 steps from step 2 on" in said
    assert "2 older ones gave way; 0 dumps, 0 held back; 0 tensors found no room" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(50 * 60)
def test_a_flight_recorder_of_llama_cpp_writes_when_it_is_asked(capture, tmp_path):
    """SIGUSR1 writes a dump. The last steps behind the dump outlive a kill, in the ring file."""
    with subprocess.Popen(
        [
            capture, capture.with_name("tiny.gguf"), "Swifts", *FLIGHT, "--steps", "8",
            "--ring-file", "ring", "--new", "50000",
        ],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
    ) as host:  # fmt: skip
        try:
            told = until("the last steps are in memory", host.stderr)
            assert f"kill -USR1 {host.pid} writes them" in told
            host.send_signal(signal.SIGUSR1)
            told = until("SIGUSR1", host.stderr)
        finally:
            host.kill()
    steps, oldest = map(int, re.search(r"has (\d) steps, from step (\d+) on", told).groups())
    last = oldest + steps - 1
    with ActivationReader(tmp_path / "flight" / "dump-000001.stream") as reader:
        assert reader.steps == tuple(range(oldest, last + 1))
        assert reader["l_out-1"].at(step=last).shape == (10 if last == 0 else 1, 128)
    report = salvage_ring(tmp_path / "ring", tmp_path / "last.stream", progress=False)
    assert report.pid == host.pid and not report.problem
    behind = [one.step for one in report.steps]
    assert len(behind) <= 8 and all(step > last for step in behind)
    assert all(b == a + 1 for a, b in itertools.pairwise(behind))


def until(text: str, lines: Iterable[str]) -> str:
    """The next line that has a text. A program that ends without it fails the test."""
    before = []
    for line in lines:
        if text in line:
            return line
        before.append(line)
    raise AssertionError("".join(before))
