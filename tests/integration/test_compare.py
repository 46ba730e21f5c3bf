"""Two captures compared, beside numpy over the tensors that the test keeps."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from llm_instrumentation._native import DTYPE_CODES, Session
from llm_instrumentation.analysis.compare import RTOL, compare_captures
from llm_instrumentation.cli import main
from llm_instrumentation.cli.exit_codes import ExitCode
from llm_instrumentation.errors import CorruptError, InvalidArgumentError, NotFoundError
from torch import Tensor, nn

LOSSLESS = InstrumentationConfig.max().with_float32()
GOLDEN = Path(__file__).parents[1] / "golden"


def write(path: Path, tensors: list[tuple[str, int, Tensor]]) -> Path:
    """Writes a capture of some tensors, each with its layer and step."""
    session = Session(path, codec="lz4", workers=1, max_memory_bytes=16 << 20)
    for name, step, tensor in tensors:
        code = DTYPE_CODES[str(tensor.dtype).removeprefix("torch.")]
        layer, tensor = session.layer(name, "", ""), tensor.contiguous()
        assert session.enqueue(layer, code, tuple(tensor.shape), tensor.data_ptr(), step=step)
        session.flush()
    session.close()
    return path


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def strap(capsys):
    """Runs the command in this process. Returns its exit code, its output and its errors."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    return run


# ---- a model and its copies -----------------------------------------------------------------


def captured(model: nn.Module, ids: Tensor, path: Path) -> Path:
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        for one in ids:
            model(one[None])
    return path


def test_measures_are_those_of_numpy(build, ids, tmp_path):
    a = captured(build("llama"), ids, tmp_path / "a.stream")
    b = captured(build("llama").to(torch.bfloat16), ids, tmp_path / "b.stream")
    found = compare_captures(a, b)
    with ActivationReader(a) as reader_a, ActivationReader(b) as reader_b:
        assert [layer.name for layer in found.layers] == list(reader_a.layers)
        for layer in found.layers:
            x = np.asarray(reader_a[layer.name], np.float64)
            y = np.asarray(reader_b[layer.name], np.float64)
            relative = np.linalg.norm(y - x) / np.linalg.norm(x)
            each = [np.linalg.norm(q - p) / np.linalg.norm(p) for p, q in zip(x, y, strict=True)]
            assert layer.tensors == 2
            assert layer.dtypes_a == ("float32",)
            assert layer.max_abs_error == np.abs(y - x).max()
            assert layer.relative_error == pytest.approx(relative)
            assert layer.worst_relative_error == pytest.approx(max(each))
            assert layer.worst_step == int(np.argmax(each))
            assert layer.snr_db == pytest.approx(10 * np.log10((x**2).sum() / ((y - x) ** 2).sum()))
            assert layer.cosine == pytest.approx(
                (x * y).sum() / np.linalg.norm(x) / np.linalg.norm(y)
            )
    assert found.other_tokens is None


def test_the_first_layer_that_differs_is_the_one_that_was_changed(build, ids, tmp_path):
    a = captured(build("llama"), ids, tmp_path / "a.stream")
    changed = build("llama").to(torch.bfloat16)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight *= 1.2
    found = compare_captures(a, captured(changed, ids, tmp_path / "b.stream"))
    assert not found.agree
    assert (found.first.layer, found.first.step) == ("model.layers.1.mlp.up_proj", 0)
    assert found.first.relative_error == pytest.approx(0.2, rel=0.05)
    assert found.first.tolerance == RTOL["bfloat16"]
    before = [layer.name for layer in found.layers if not layer.over]
    assert "model.layers.0" in before and "model.layers.1.self_attn" in before
    with ActivationReader(a) as reader:
        assert reader.index["layer"][found.first.row_a].as_py() == found.first.layer


def test_a_capture_agrees_with_its_repetition(build, ids, tmp_path):
    a, b = (captured(build("gpt2"), ids, tmp_path / f"{name}.stream") for name in "ab")
    found = compare_captures(a, b)
    assert found.agree and found.first is None
    assert all(layer.equal == layer.tensors == 2 for layer in found.layers)
    assert {layer.snr_db for layer in found.layers} == {math.inf}


def test_the_error_of_storing_is_no_difference_of_the_models(build, ids, tmp_path):
    """An archive rounds more than float16 does, and its index says how much."""
    model = build("llama")
    with torch.no_grad():
        with capture_activations(model, tmp_path / "a.stream", config=LOSSLESS):
            model(ids)
        archive = InstrumentationConfig.max().with_archive()
        with capture_activations(model, tmp_path / "b.archive", config=archive):
            model(ids)
    found = compare_captures(tmp_path / "a.stream", tmp_path / "b.archive")
    assert max(layer.relative_error for layer in found.layers) > 2 * RTOL["float16"]
    assert found.agree
    assert not compare_captures(tmp_path / "a.stream", tmp_path / "b.archive", rtol=1e-3).agree


def test_the_step_from_which_generations_have_other_tokens(build, ids, tmp_path):
    paths = []
    for name, scale in (("a", 1.0), ("b", -1.0)):
        model = build("llama")
        with torch.no_grad():
            model.lm_head.weight *= scale  # the other model generates the least likely tokens
            with capture_activations(model, tmp_path / f"{name}.stream", config=LOSSLESS):
                model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        paths.append(tmp_path / f"{name}.stream")
    assert compare_captures(*paths).other_tokens == 1
    assert compare_captures(*paths, steps=0).other_tokens is None


# ---- pairs ----------------------------------------------------------------------------------


def test_tensors_are_paired_by_step_call_and_order(tmp_path):
    x = noise(4, 3)
    a = write(tmp_path / "a.stream", [("h", 0, x), ("h", 0, 2 * x), ("h", 1, 3 * x), ("h", 3, x)])
    b = write(tmp_path / "b.stream", [("h", 1, 3 * x), ("h", 0, x), ("h", 0, 2 * x), ("h", 2, x)])
    found = compare_captures(a, b)
    (layer,) = found.layers
    assert (layer.tensors, layer.equal, layer.only_a, layer.only_b) == (3, 3, 1, 1)
    assert not found.agree
    assert list(found.pairs["row_a"]) == [0, 1, 2]
    assert list(found.pairs["row_b"]) == [1, 2, 0]
    assert compare_captures(a, b, steps=slice(0, 2)).agree


def test_layers_of_one_capture_are_listed(tmp_path):
    x = noise(2, 2)
    a = write(tmp_path / "a.stream", [("h", 0, x), ("old", 0, x)])
    b = write(tmp_path / "b.stream", [("h", 0, x), ("new", 0, x)])
    found = compare_captures(a, b)
    assert (found.only_in_a, found.only_in_b) == (("old",), ("new",))
    assert found.agree
    assert compare_captures(a, b, "h").only_in_b == ()


def test_layers_of_a_ported_model_have_other_names(tmp_path):
    x = noise(2, 2)
    names = ["model.layers.0.mlp.up", "model.layers.1.mlp.up", "model.norm"]
    theirs = ["blocks.0.ffn.up", "blocks.1.ffn.up", "final_norm"]
    a = write(tmp_path / "a.stream", [(name, 0, n * x) for n, name in enumerate(names)])
    b = write(tmp_path / "b.stream", [(name, 0, n * x) for n, name in enumerate(theirs)])
    rename = {"model.layers.*.mlp.*": "blocks.*.ffn.*", "model.norm": "final_norm"}
    found = compare_captures(a, b, rename=rename)
    assert [(layer.name, layer.name_b) for layer in found.layers] == [
        *zip(names, theirs, strict=True)
    ]
    assert found.agree
    with pytest.raises(InvalidArgumentError, match="no layer in common.*'model.layers.0.mlp.up'"):
        compare_captures(a, b)
    with pytest.raises(InvalidArgumentError, match=r"both need the same number of \*"):
        compare_captures(a, b, rename={"model.*": "final_norm"})
    with pytest.raises(KeyError, match=r"no activation named 'layers\.\*'"):
        compare_captures(a, b, rename={"layers.*": "blocks.*"})
    with pytest.raises(InvalidArgumentError, match="are both compared with 'final_norm'"):
        compare_captures(a, b, rename=dict.fromkeys(names, "final_norm"))


def test_shapes_that_differ_are_reported_and_those_of_length_1_are_the_same(tmp_path):
    x = noise(3, 4)
    a = write(tmp_path / "a.stream", [("h", 0, x), ("h", 1, x), ("same", 0, x[None])])
    b = write(tmp_path / "b.stream", [("h", 0, x.T), ("h", 1, x), ("same", 0, x)])
    found = compare_captures(a, b)
    h, same = found.layers
    assert (h.tensors, h.incomparable, h.equal) == (1, 1, 1)
    assert h.reason == "shape [3, 4] in the first capture, [4, 3] in the second"
    assert same.equal == 1
    assert not found.agree and found.first is None


def test_a_sample_is_compared_with_the_same_sample_alone(build, ids, tmp_path):
    paths = {}
    for seed in (0, 1):
        config = InstrumentationConfig.max().with_float32()
        config = config.with_granularity("sampled_slices").with_sampling(0.5, seed=seed)
        for name in "ab":
            paths[name, seed] = tmp_path / f"{name}{seed}.stream"
            model = build("llama")
            with torch.no_grad(), capture_activations(model, paths[name, seed], config=config):
                model(ids)
    assert compare_captures(paths["a", 0], paths["b", 0]).agree
    other = compare_captures(paths["a", 0], paths["b", 1])
    assert {layer.incomparable for layer in other.layers} == {1}
    assert "only some elements" in other.layers[0].reason


def test_a_stream_of_1_3_1_is_compared_by_order(tmp_path):
    paths = [tmp_path / f"{codec}.stream" for codec in ("lz4", "zstd")]
    for path in paths:
        shutil.copy(GOLDEN / f"older-{path.stem}.packets", path)
    with pytest.warns(RuntimeWarning, match="no index tells"):
        found = compare_captures(*paths)
    assert found.agree
    assert [(layer.name, layer.tensors) for layer in found.layers] == [
        ("small", 3), ("big", 3), ("", 3),
    ]  # fmt: skip


# ---- tolerances -----------------------------------------------------------------------------


def test_the_tolerance_is_that_of_the_coarsest_type(tmp_path):
    x = noise(64, 64)
    for dtype, other, tolerance in (
        (torch.float64, torch.float64, 1e-7),
        (torch.float64, torch.bfloat16, 1.6e-2),
        (torch.float16, torch.bfloat16, 1.6e-2),
        (torch.int64, torch.int64, 0.0),
    ):
        a = write(tmp_path / "a.stream", [("h", 0, (100 * x).to(dtype))])
        b = write(tmp_path / "b.stream", [("h", 0, (100 * x).to(other))])
        found = compare_captures(a, b)
        assert found.layers[0].tolerance == tolerance
        assert found.agree
        changed = write(tmp_path / "c.stream", [("h", 0, (103 * x).to(other))])
        assert not compare_captures(a, changed).agree


def test_the_tolerances_that_are_given(tmp_path):
    x = noise(100)
    a = write(tmp_path / "a.stream", [("h", 0, x)])
    b = write(tmp_path / "b.stream", [("h", 0, x * (1 + 1e-3))])
    assert compare_captures(a, b, rtol=1.01e-3).agree
    assert not compare_captures(a, b, rtol=0.99e-3).agree
    rms = 1e-3 * float(x.square().mean().sqrt())
    assert compare_captures(a, b, rtol=0, atol=1.01 * rms).agree
    assert not compare_captures(a, b, rtol=0, atol=0.99 * rms).agree
    with pytest.raises(InvalidArgumentError, match="rtol = -1: give a number from 0"):
        compare_captures(a, b, rtol=-1)


def test_nan_in_one_capture_is_a_difference(tmp_path):
    x = noise(10)
    x[3] = math.nan
    a = write(tmp_path / "a.stream", [("h", 0, x), ("zero", 0, torch.zeros(4))])
    assert compare_captures(a, a).agree
    y = x.clone()
    y[4] = math.inf
    b = write(tmp_path / "b.stream", [("h", 0, y), ("zero", 0, torch.ones(4))])
    h, zero = compare_captures(a, b, rtol=1e9).layers
    assert (h.nonfinite, h.over, h.relative_error) == (1, 1, 0)
    assert (zero.over, zero.relative_error, zero.snr_db) == (1, math.inf, -math.inf)


# ---- the work -------------------------------------------------------------------------------


def test_progress_is_told_and_can_stop_the_work(tmp_path):
    x = noise(7, 9)
    a = write(tmp_path / "a.stream", [("h", step, step * x) for step in range(40)])
    b = write(tmp_path / "b.stream", [("h", step, step * x + 1) for step in range(40)])
    seen = []
    found = compare_captures(a, b, progress=lambda *how: seen.append(how))
    assert seen == [(16, 40), (32, 40)]
    np.testing.assert_allclose(
        found.pairs["relative_error"][1:],
        [np.sqrt(63) / np.linalg.norm(step * x.numpy()) for step in range(1, 40)],
    )

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare_captures(a, b, progress=stop)


@pytest.fixture
def damaged(tmp_path):
    """Two captures; the last packet of the second has wrong bytes."""
    tensors = [("h", 0, noise(9)), ("h", 1, noise(100, 100))]
    a, b = (write(tmp_path / f"{name}.stream", tensors) for name in "ab")
    with open(b, "r+b") as file:
        file.seek(-2, 2)
        file.write(b"xx")
    return a, b


def test_a_damaged_packet_names_its_capture(damaged):
    a, b = damaged
    with pytest.raises(CorruptError, match=r"b\.stream: .*strap salvage copies what is intact"):
        compare_captures(a, b)


def test_files_that_cannot_be_compared(tmp_path):
    a = write(tmp_path / "a.stream", [("h", 0, noise(3))])
    with pytest.raises(NotFoundError, match=r"none\.stream"):
        compare_captures(a, tmp_path / "none.stream")
    empty = write(tmp_path / "empty.stream", [])
    with pytest.raises(InvalidArgumentError, match=r"empty\.stream has no activations"):
        compare_captures(a, empty)
    with pytest.raises(KeyError, match="no activation named 'g'"):
        compare_captures(a, a, "g")


# ---- strap compare --------------------------------------------------------------------------


def test_the_command_tells_where_it_begins(build, ids, tmp_path, strap):
    a = captured(build("llama"), ids, tmp_path / "a.stream")
    changed = build("llama").to(torch.bfloat16)
    with torch.no_grad():
        changed.model.layers[1].mlp.up_proj.weight *= 1.2
    b = captured(changed, ids, tmp_path / "b.stream")
    figure, heat_map = tmp_path / "drift.pdf", tmp_path / "tokens.png"
    code, out, err = strap("compare", a, b, "--figure", figure, "--heat-map", heat_map)
    assert (code, err) == (ExitCode.DIFFERENT, "")
    head, *rows, last = out.splitlines()
    assert re.split(r"  +", head.strip())[-2:] == ["types", "layer"]
    up = next(row for row in rows if row.endswith("  model.layers.1.mlp.up_proj"))
    assert re.split(r"  +", up.strip())[:3] == ["2", "0", "2"]
    assert last.startswith(
        "first beyond the tolerance: model.layers.1.mlp.up_proj in step 0: relative error 0.2"
    )
    assert figure.read_bytes().startswith(b"%PDF")
    assert heat_map.read_bytes().startswith(b"\x89PNG")
    code, out, _ = strap("compare", a, b, "--rtol", "10", "--steps", "0", "--json")
    told = json.loads(out)
    assert code == ExitCode.OK and told["agree"] and told["first"] is None
    assert told["layers"][0]["tensors"] == 1
    assert "pairs" not in told


def test_the_command_tells_what_has_no_partner(tmp_path, strap):
    x = noise(3, 4)
    a = write(tmp_path / "a.stream", [("h.0", 0, x), ("h.0", 1, x), ("g", 0, x), ("l", 0, x)])
    b = write(tmp_path / "b.stream", [("b.0", 0, x), ("g", 0, x.T), ("r", 0, x)])
    code, out, err = strap("compare", a, b, "--map", "h.*=b.*")
    assert code == ExitCode.DIFFERENT
    assert "h.0 = b.0" in out
    assert f"only in {a}: l\nonly in {b}: r\n" in out
    assert "no tensor is beyond the tolerance" in out
    assert "h.0: 1 tensors are in the first capture alone, 0 in the second" in err
    assert "g: 1 tensors cannot be compared; the first: shape [3, 4]" in err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--map", "h"], ExitCode.USAGE, "--map 'h': give it as"),
        (["--figure", "x.gif"], ExitCode.USAGE, "--figure x.gif: the name ends in .png"),
        (["--rtol", "-1"], ExitCode.USAGE, "rtol = -1.0: give a number from 0"),
        (["other"], ExitCode.NOT_FOUND, "no activation named 'other'"),
    ],
)
def test_wrong_options_of_the_command(tmp_path, strap, options, code, message):
    a = write(tmp_path / "a.stream", [("h", 0, noise(3))])
    found, out, err = strap("compare", a, a, *options)
    assert (found, out) == (code, "")
    assert message in err


def test_a_damaged_capture_has_its_exit_code(damaged, strap):
    code, out, err = strap("compare", *damaged)
    assert (code, out) == (ExitCode.DAMAGED, "")
    assert "b.stream: " in err and "strap salvage copies what is intact" in err
