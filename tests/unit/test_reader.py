"""ActivationReader reads real captures: selection, values, twins, samples, damage and notes."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
import subprocess
import sys
import threading
import warnings

import duckdb
import lz4.frame
import numpy as np
import pyarrow as pa
import pytest
import torch
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llm_instrumentation import ActivationReader, StrapError
from llm_instrumentation._native import DTYPE_CODES, DTYPE_SIZES, Reader, Session
from llm_instrumentation.analysis import UnknownActivationError
from llm_instrumentation.core.sampling import parameters_json, sample_positions
from llm_instrumentation.errors import (
    CorruptError,
    InvalidStateError,
    NotFoundError,
    UnsupportedError,
)


@contextlib.contextmanager
def capturing(path, codec="zstd", **options):
    """Captures to `path` in a with block; yields a function put(name, tensor, ...)."""
    session = Session(path, codec=codec, workers=1, max_memory_bytes=16 << 20, **options)

    def put(name, tensor, path="", model="", **about):
        tensor = tensor.contiguous()
        code = DTYPE_CODES[str(tensor.dtype).removeprefix("torch.")]
        layer = session.layer(name, path, model)
        assert session.enqueue(layer, code, tuple(tensor.shape), tensor.data_ptr(), **about)

    put.session = session
    try:
        yield put
    finally:
        session.close()


def bits(tensor):
    """The bytes of a tensor, to compare NaN and -0 exactly."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def index_of(path):
    with pa.ipc.open_stream(f"{path}.index") as file:
        return file.read_all()


def rewrite_index(path, change):
    """Rewrites an index after `change` edited its rows, a list of dicts."""
    table = index_of(path)
    rows = table.to_pylist()
    change(rows)
    with pa.ipc.new_stream(f"{path}.index", table.schema) as file:
        file.write_table(pa.Table.from_pylist(rows, schema=table.schema))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.stream"


@pytest.fixture
def run(path):
    """A capture of two layers over four steps; one has two outputs and is called twice a step."""
    torch.manual_seed(0)
    with capturing(path) as put:
        for step in range(4):
            length = 5 if step == 0 else 1
            for call in range(2):
                put("h.0", torch.full((1, length, 8), step + call / 2), step=step, token=step,
                    call=call)  # fmt: skip
            put("h.0", torch.arange(6).reshape(2, 3), path="[1]", step=step, token=step)
            put("", torch.tensor(float(step)), step=step, token=step)
    return path


# ---- finding --------------------------------------------------------------------


def test_a_capture_lists_its_layers_steps_and_tokens(run):
    with ActivationReader(run) as reader:
        assert reader.layers == ("h.0", "h.0[1]", "")
        assert reader.steps == reader.tokens == (0, 1, 2, 3)
        assert len(reader) == len(list(reader)) == 16
        assert "h.0[1]" in reader and "h.1" not in reader
        assert reader.info.packets == 16 and reader.problem == "" and reader.token_metadata is None
        assert repr(reader).startswith(f"<ActivationReader {str(run)!r}: 16 activations, 3 layers")


def test_a_layer_is_a_sequence(run):
    with ActivationReader(run) as reader:
        view = reader["h.0"]
        assert len(view) == 8 and [a.step for a in view] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert view[-1] == view[7] == view[4:][3] and view[-1] != view[6]
        assert [a.call for a in view[2:5]] == [0, 1, 0]
        assert [a.step for a in reversed(view[::2])] == [3, 2, 1, 0]
        with pytest.raises(IndexError):
            view[8]
        assert repr(view) == "<ActivationView: 8 activations of 1 layer, steps 0 to 3>"


def test_an_activation_has_the_columns_of_its_index_row(run):
    with ActivationReader(run) as reader:
        activation = reader["h.0[1]"][2]
        row = reader.index.slice(activation.row, 1).to_pylist()[0]
        assert (activation.name, activation.layer, activation.path) == ("h.0[1]", "h.0", "[1]")
        assert (activation.step, activation.token, activation.call, activation.rank) == (2, 2, 0, 0)
        assert (activation.shape, activation.dtype) == ((2, 3), "int64")
        for column in ("model", "thread", "sequence", "time_ns", "codec", "source_dtype"):
            assert getattr(activation, column) == row[column]
        assert activation.mse is None and activation.error is None and not activation.overflowed
        assert repr(activation) == "<Activation 'h.0[1]', step 2, token 2, int64 (2, 3)>"
        scalar = reader[""][3]
        assert scalar.shape == () and scalar.source_dtype == "float32" and scalar.mse == 0


def test_stored_bytes_add_up_to_those_of_the_session(path):
    with capturing(path) as put:
        put("h.ä", torch.randn(100))
        put("h.ä", torch.full((30,), 1e6), path="[1]")  # with a float32 twin
        put("", torch.empty(0))
        put.session.flush()
        stored = put.session.stats().stored_bytes
    with ActivationReader(path) as reader:
        assert sum(a.stored_bytes for a in reader) == stored


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (2, {2}),
        (slice(1, 3), {1, 2}),
        (slice(1, None, 2), {1, 3}),
        (slice(None), {0, 1, 2, 3}),
        ({0, 3, 99}, {0, 3}),
        (range(2), {0, 1}),
        (np.array([1]), {1}),
        ([], set()),
        (None, {0, 1, 2, 3}),
    ],
)
def test_steps_are_selected_by_value(run, wanted, found):
    with ActivationReader(run) as reader:
        assert {a.step for a in reader["h.0"].select(steps=wanted)} == found
        assert {a.step for a in reader.select(steps=wanted)} == found
        assert {a.token for a in reader.select(tokens=wanted)} == found


def test_steps_that_are_not_in_order_are_found(path):
    steps = [3, 0, 2, 0, 7, -1, 3]  # -1 is an unknown step
    with capturing(path) as put:
        for k, step in enumerate(steps):
            put("x", torch.tensor([float(k)]), step=step)
    with ActivationReader(path) as reader:
        for view in (reader["x"], reader["x"][::-1], reader.select()[1:]):
            rows = [activation.row for activation in view]
            for wanted in (0, 2, 3, 5, 7, 2**70, slice(0, 3), slice(3, 2), slice(2, 2**70)):
                inside = wanted if isinstance(wanted, slice) else slice(wanted, wanted + 1)
                fits = [row for row in rows if inside.start <= steps[row] < inside.stop]
                for _ in range(2):  # the first call sorts the steps, the second uses the order
                    assert [a.row for a in view.select(steps=wanted)] == fits
        assert reader["x"].at(step=2).row == 2 and reader["x"].at(step=2, call=0).row == 2
        with pytest.raises(KeyError, match="no activation at step=5"):
            reader["x"].at(step=5)
        with pytest.raises(ValueError, match="2 activations at step=0"):
            reader["x"].at(step=0)


def test_calls_and_layers_are_selected_in_capture_order(run):
    with ActivationReader(run) as reader:
        assert [a.call for a in reader["h.0"].select(steps=1, calls=1)] == [1]
        assert {a.name for a in reader.select("h.*")} == {"h.0", "h.0[1]"}
        assert {a.name for a in reader.select("h.?")} == {"h.0"}
        assert {a.name for a in reader.select("*[1]")} == {"h.0[1]"}  # brackets are literal
        names = [a.name for a in reader.select(["", "h.0[1]"], steps=slice(2))]
        assert names == ["h.0[1]", "", "h.0[1]", ""]
        assert list(reader.select([])) == []


@pytest.mark.parametrize("wanted", [-1, slice(-2, None), slice(0, 4, -1), "1", 1.5, [0, -1]])
def test_a_selector_that_makes_no_sense_is_refused(run, wanted):
    with ActivationReader(run) as reader, pytest.raises(ValueError, match="step"):
        reader.select(steps=wanted)


def test_one_activation_is_found_by_its_step(run):
    with ActivationReader(run) as reader:
        assert reader["h.0"].at(step=3, call=1).to_torch().unique().item() == 3.5
        assert reader[""].at(token=2).step == 2
        with pytest.raises(ValueError, match="2 activations at step=3: name their call too"):
            reader["h.0"].at(step=3)
        with pytest.raises(KeyError, match=r"no activation at step=9: .* steps 0 to 3"):
            reader["h.0"].at(step=9)


def test_an_unknown_name_suggests_others(run):
    with ActivationReader(run) as reader:
        with pytest.raises(KeyError, match=r"named 'h\.9'\. Did you mean 'h\.0'") as raised:
            reader["h.9"]
        assert isinstance(raised.value, StrapError)
        with pytest.raises(KeyError, match=r"'zzzz\*'. It has 'h\.0', "):
            reader.select(["h.0", "zzzz*"])
        with pytest.raises(KeyError, match="names are strings"):
            reader[0]


# ---- values ---------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
# torch 2.2 lacks uint16, uint32, uint64 and float8_e8m0fnu.
DTYPES = [name for name in DTYPE_CODES if hasattr(torch, name)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    kinds=st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), min_size=1),
    codec=st.sampled_from(["none", "lz4", "zstd"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_type_and_shape_comes_back(path, kinds, codec, seed):
    tensors = [any_tensor(name, shape, seed) for name, shape in kinds]
    with capturing(path, codec, keep_float32=True) as put:
        for (name, _), tensor in zip(kinds, tensors, strict=True):
            put(name, tensor)
    with ActivationReader(path) as reader:
        assert len(reader) == len(tensors)
        for activation, tensor in zip(reader, tensors, strict=True):
            assert activation.dtype == activation.source_dtype == activation.name
            values = activation.to_torch()
            assert values.dtype == tensor.dtype and values.shape == tensor.shape
            assert bits(values) == bits(tensor)
            array = activation.to_numpy()
            assert array.shape == tensor.shape
            np.testing.assert_array_equal(array, as_numpy(tensor))


def any_tensor(name, shape, seed):
    """A tensor of random bytes, so also of NaN and infinities."""
    size = math.prod(shape) * DTYPE_SIZES[name]
    content = np.random.default_rng(seed).integers(2 if name == "bool" else 256, size=size)
    tensor = torch.empty(math.prod(shape), dtype=getattr(torch, name))
    if size:
        tensor.view(torch.uint8).copy_(torch.from_numpy(content))
    return tensor.view(shape)


def as_numpy(tensor):
    """The array that to_numpy should return, made with torch's own conversions."""
    if tensor.dtype == torch.bfloat16 or str(tensor.dtype).startswith("torch.float8"):
        return tensor.to(torch.float32).numpy()
    if tensor.dtype == torch.complex32:
        return torch.view_as_complex(torch.view_as_real(tensor).float()).numpy()
    return tensor.numpy()


@pytest.mark.parametrize("name", [n for n in DTYPES if n.startswith(("float8", "bfloat"))])
def test_all_values_of_the_types_that_numpy_lacks(path, name):
    size = DTYPE_SIZES[name]
    every = torch.arange(256**size).to(torch.uint8 if size == 1 else torch.int16)
    every = every.view(getattr(torch, name))
    with capturing(path) as put:
        put("all", every)
    with ActivationReader(path) as reader:
        array = reader["all"][0].to_numpy()
    assert array.dtype == np.float32
    expected = every.float().numpy()
    np.testing.assert_array_equal(array, expected)
    np.testing.assert_array_equal(np.signbit(array), np.signbit(expected))  # -0 too


def test_float32_is_read_as_the_documented_float16(path):
    tensor = torch.randn(3, 4)
    with capturing(path) as put:
        put("x", tensor)
    with ActivationReader(path) as reader:
        activation = reader["x"][0]
        assert (activation.source_dtype, activation.dtype) == ("float32", "float16")
        assert torch.equal(activation.to_torch(), tensor.half())
        assert activation.mse == pytest.approx((tensor - tensor.half()).square().mean().item())


def test_values_beyond_float16_are_read_from_their_twin(path):
    tensor = torch.tensor([1.0, 1e6, -3e38, math.inf])
    with capturing(path) as put:
        put("x", torch.ones(4))
        put("x", tensor)
        put("x", -tensor)
        put("y", tensor, step=3)
    with ActivationReader(path) as reader:
        assert reader.layers == ("x", "y") and len(reader) == 4
        assert [a.overflowed for a in reader["x"]] == [False, True, True]
        assert torch.equal(reader["x"][1].to_torch(), tensor)
        np.testing.assert_array_equal(reader["x"][2].to_numpy(), -tensor.numpy())
        rounded = reader["x"][1].to_torch(exact=False)
        assert rounded.dtype == torch.float16 and torch.equal(rounded, tensor.half())
        assert reader["y"][0].dtype == "float16" and reader["y"][0].step == 3
        stacked = reader["x"].stack()
        assert stacked.dtype == torch.float32
        assert torch.equal(stacked, torch.stack([torch.ones(4), tensor, -tensor]))
        assert reader["x"].stack(exact=False).dtype == torch.float16


def test_twins_of_threads_that_alternate_find_their_tensor(path):
    with capturing(path) as put:

        def work(n):
            for step in range(50):
                put("shared", torch.full((64,), 1e5 * (n + 1) + step), step=step)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with ActivationReader(path) as reader:
        assert len(reader) == 200 and not reader.missing
        for step in reader.steps:
            values = {a.thread: a.to_torch()[0].item() for a in reader.select(steps=step)}
            assert sorted(values.values()) == [1e5 * (n + 1) + step for n in range(4)]
        for activation in reader:  # each has the twin of its own thread
            assert activation.to_torch().unique().numel() == 1
            base = activation.to_torch(exact=False)
            assert base.isinf().all()


def test_a_twin_whose_float16_packet_is_lost_is_an_activation_itself(path):
    with capturing(path) as put:
        put("x", torch.ones(2))
        put("x", torch.full((2,), 1e6))

    def lose(rows):
        rows[1].update(offset=None, length=0, error="lost in the damaged stream")

    rewrite_index(path, lose)
    with ActivationReader(path, warn=False) as reader:
        ones, big = (a for a in reader["x"] if a.source_dtype)
        assert not ones.overflowed and ones.to_torch().tolist() == [1, 1]
        assert big.dtype == "float32" and big.to_torch().tolist() == [1e6, 1e6]
        assert [m.error for m in reader.missing] == ["lost in the damaged stream"]


@pytest.mark.parametrize("target", [torch.float64, "float64", np.float64, float])
def test_values_are_converted(path, target):
    with capturing(path) as put:
        put("x", torch.tensor([1.5, 2.0], dtype=torch.bfloat16))
    with ActivationReader(path) as reader:
        activation = reader["x"][0]
        assert activation.to_torch(dtype=target).dtype == torch.float64
        assert activation.to_numpy(dtype=target).tolist() == [1.5, 2.0]
        assert activation.to_numpy(dtype=target).dtype == np.float64
        with pytest.raises(ValueError, match="choose one of float32, float16"):
            activation.to_torch(dtype="floaty")
        with pytest.raises(ValueError, match="numpy has no float8_e5m2"):
            activation.to_numpy(dtype="float8_e5m2")


def test_a_type_that_this_torch_lacks_is_named(path, monkeypatch):
    with capturing(path) as put:
        put("x", torch.ones(2).to(torch.float8_e5m2))
    monkeypatch.delattr(torch, "float8_e5m2")
    with ActivationReader(path) as reader:
        with pytest.raises(UnsupportedError, match=r"has no float8_e5m2: use to_numpy"):
            reader["x"][0].to_torch()
        assert reader["x"][0].to_numpy().tolist() == [1, 1]


def test_a_default_device_does_not_matter(run):
    with ActivationReader(run) as reader, torch.device("meta"):
        assert reader[""].stack().tolist() == [0, 1, 2, 3]
        assert reader[""][3].to_torch().item() == 3


def test_activations_are_stacked_and_concatenated(run):
    with ActivationReader(run) as reader:
        later = reader["h.0"].select(steps=slice(1, None), calls=0)
        assert later.stack().shape == (3, 1, 1, 8)
        assert later.stack()[:, 0, 0, 0].tolist() == [1, 2, 3]
        every = reader["h.0"].select(calls=0)
        assert torch.equal(every.cat(1), torch.cat([a.to_torch() for a in every], 1))
        assert torch.equal(every.cat(-2), every.cat(1))
        assert torch.equal(later.cat(), torch.cat([a.to_torch() for a in later]))
        assert later.cat(2, dtype="float64").dtype == torch.float64
        assert reader[""].stack().tolist() == [0, 1, 2, 3]


def test_what_cannot_be_joined_is_explained(run):
    with ActivationReader(run) as reader:
        shapes = r"8 activations of \(1, 1, 8\) \(6\), \(1, 5, 8\) \(2\)"
        with pytest.raises(ValueError, match=f"cannot stack {shapes}"):
            reader["h.0"].stack()
        with pytest.raises(ValueError, match=f"concatenate along dimension 2 {shapes}"):
            reader["h.0"].cat(2)
        with pytest.raises(ValueError, match="scalars can be stacked"):
            reader[""].cat()
        with pytest.raises(ValueError, match="dimension 3 of shape"):
            reader["h.0"].cat(3)
        with pytest.raises(ValueError, match="the selection is empty"):
            reader["h.0"].select(steps=99).stack()


@pytest.fixture
def crowd(path):
    """A capture of 1,200 small packets of three shapes and types; some have a twin or are empty."""
    generator = torch.Generator().manual_seed(0)
    with capturing(path, codec="lz4") as put:
        for step in range(200):
            small = torch.randn(1, 1 + step % 3, 8, generator=generator)
            put("h.0", small, step=step)
            put("h.1", small.bfloat16(), step=step)
            put("h.1", small > 0, path="[1]", step=step)
            put("lm", small * (1e6 if step % 50 == 7 else 1), step=step)
            put("empty", torch.empty(0, 3), step=step)
            put("long", torch.arange(100_000 if step == 60 else 3), step=step)
    return path


@pytest.mark.parametrize("ignore_index", [False, True])
def test_activations_read_in_turn_equal_those_read_alone(crowd, ignore_index):
    """Reading in turn decodes many packets ahead, and gives the same values."""
    with ActivationReader(crowd, ignore_index=ignore_index) as reader:
        for view in (reader.select(), reader["h.1"], reader.select()[::-1], reader.select()[5::7]):
            assert len(view) > 100
            for place, activation in enumerate(view):
                alone = view[place]
                assert activation == alone
                assert bits(activation.to_torch()) == bits(alone.to_torch())
            for place, activation in enumerate(view):
                values, alone = activation.to_numpy(), view[place].to_numpy()
                assert values.dtype == alone.dtype and values.tobytes() == alone.tobytes()
                assert values.flags.owndata or values.base.nbytes == values.nbytes
            found = [activation.to_numpy(dtype="float64") for activation in view]
            assert all(values.dtype == np.float64 for values in found)


def test_values_read_in_turn_can_be_written_to(crowd):
    with ActivationReader(crowd) as reader:
        first = [activation.to_torch() for activation in reader["h.0"]]
        before = [values.clone() for values in first]
        for values in first[::2]:
            values.fill_(7)
        assert all(torch.equal(a, b) for a, b in zip(first[1::2], before[1::2], strict=True))
        again = [activation.to_numpy() for activation in reader["h.0"]]
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(again, before, strict=True))


def test_activations_are_read_in_any_order(crowd):
    with ActivationReader(crowd) as reader:
        activations = list(reader)
        order = np.random.default_rng(0).permutation(len(activations)).tolist()
        order = [*range(300), *order, *range(250, 600)]
        for k in order:
            assert bits(activations[k].to_torch()) == bits(reader.select()[k].to_torch())


def test_threads_share_packets_read_ahead(crowd):
    with ActivationReader(crowd) as reader:
        activations = list(reader["h.0"])
        alone = [reader["h.0"][k].to_numpy() for k in range(len(activations))]
        wrong = []

        def read():
            for activation, values in zip(activations, alone, strict=True):
                if not np.array_equal(activation.to_numpy(), values):
                    wrong.append(activation)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_a_closed_reader_gives_nothing_that_was_read_ahead(crowd):
    with ActivationReader(crowd) as reader:
        activations = list(reader["h.0"])
        for activation in activations[:100]:
            activation.to_numpy()
    for activation in activations[:110]:
        with pytest.raises(InvalidStateError):
            activation.to_numpy()


def test_a_damaged_packet_does_not_affect_the_packets_read_with_it(crowd):
    with ActivationReader(crowd) as reader:
        bad = reader["h.0"][100].row
        end = reader.index["offset"][bad].as_py() + reader.index["length"][bad].as_py()
    data = bytearray(crowd.read_bytes())
    data[end - 6] ^= 1
    crowd.write_bytes(data)
    with ActivationReader(crowd) as reader:
        damaged = []
        for activation in reader:
            try:
                activation.to_numpy()
            except CorruptError:
                damaged.append(activation.row)
        assert damaged == [bad]
        with pytest.raises(CorruptError, match="h.0"):
            reader["h.0"].cat(dim=1)


@pytest.mark.parametrize("dtype", [None, torch.float64])
@pytest.mark.parametrize("layer", ["h.0", "h.1", "h.1[1]", "lm", "empty"])
def test_many_activations_are_joined_like_single_tensors(crowd, layer, dtype):
    with ActivationReader(crowd) as reader:
        view = reader[layer]
        each = [view[k].to_torch(dtype=dtype) for k in range(len(view))]
        dim = 0 if layer == "empty" else 1
        if layer == "lm" and dtype is None:
            each = [values.float() for values in each]  # float16 and float32 join as float32
        joined = view.cat(dim, dtype=dtype)
        assert joined.dtype == each[0].dtype and bits(joined) == bits(torch.cat(each, dim))
        assert joined.shape == torch.cat(each, dim).shape
        assert torch.equal(view.cat(dim - each[0].ndim, dtype=dtype), joined)
        stacked = view[::3].stack(dtype=dtype)
        assert stacked.dtype == each[0].dtype
        assert bits(stacked) == bits(torch.stack(each[::3]))
        assert stacked.shape == torch.stack(each[::3]).shape


def test_different_types_are_joined_on_request_only(path):
    with capturing(path) as put:
        put("x", torch.ones(2, dtype=torch.int32))
        put("x", torch.ones(2, dtype=torch.float64))
    with ActivationReader(path) as reader:
        with pytest.raises(ValueError, match=r"of int32 \(1\), float64 \(1\): pass dtype="):
            reader["x"].stack()
        assert reader["x"].stack(dtype=torch.float64).tolist() == [[1, 1], [1, 1]]


def test_empty_tensors_and_scalars(path):
    with capturing(path, "none") as put:
        put("", torch.empty(0, 3))  # would be six zero bytes, so only the index has it
        put("x", torch.empty(2, 0))
        put("x", torch.tensor(True))
    with ActivationReader(path) as reader:
        assert reader[""][0].to_torch().shape == reader[""][0].to_numpy().shape == (0, 3)
        assert reader[""][0].stored_bytes == 0
        assert reader["x"][0].to_torch().shape == (2, 0)
        assert reader["x"][1].to_numpy().item() is True
        assert reader[""].stack().shape == (1, 0, 3)


def test_to_numpy_needs_no_torch(run):
    program = f"""
import sys
from llm_instrumentation import ActivationReader
with ActivationReader({str(run)!r}) as reader:
    print(reader["h.0"][-1].to_numpy().sum())
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "28.0\n", done.stderr


# ---- samples --------------------------------------------------------------------


def sampled(source, rate):
    """The sampled elements; indexed as bytes, because torch cannot index every type."""
    elements = source.reshape(-1).view(torch.uint8).view(source.numel(), source.element_size())
    positions = torch.tensor(sample_positions(source.numel(), rate))
    return elements[positions].view(-1).view(source.dtype)


def put_sample(put, name, source, rate):
    parameters = parameters_json(source.shape, rate).encode()
    put(name, sampled(source, rate), transform=b"sample", parameters=parameters)


@pytest.mark.parametrize("dtype", sorted(set(DTYPES) - {"float8_e8m0fnu"}))
def test_a_sample_returns_to_its_place(path, dtype):
    source = torch.arange(1, 41).remainder(7).view(8, 5).to(getattr(torch, dtype))
    with capturing(path, keep_float32=True) as put:
        put_sample(put, "x", source, 0.25)
    with ActivationReader(path) as reader:
        activation = reader["x"][0]
        assert activation.transform == "sample" and activation.shape == (10,)
        assert activation.source_shape == (8, 5)
        positions = activation.positions
        assert positions.tolist() == sample_positions(40, 0.25).tolist()
        assert bits(activation.to_torch()) == bits(sampled(source, 0.25))
        dense = activation.to_dense(fill=0)
        assert dense.shape == source.shape and dense.dtype == source.dtype
        kept = torch.zeros(40, dtype=torch.bool)
        kept[torch.tensor(positions)] = True
        expected = torch.where(kept.view(8, 5), source.to(torch.complex128), 0)
        assert torch.equal(dense.to(torch.complex128), expected)


def test_a_sample_beyond_float16_keeps_its_place(path):
    with capturing(path) as put:
        put_sample(put, "x", torch.full((4, 4), 1e9), 0.5)
    with ActivationReader(path) as reader:
        activation = reader["x"][0]
        assert activation.overflowed and activation.transform == "sample"
        dense = activation.to_dense()
        assert dense.isnan().sum() == 8 and dense.nan_to_num().sum() == 8e9
        assert activation.to_dense(exact=False).isinf().sum() == 8


def test_a_fill_must_be_a_value_of_the_type(path):
    with capturing(path) as put:
        put_sample(put, "x", torch.arange(10), 0.5)
        put("whole", torch.arange(3))
    with ActivationReader(path) as reader:
        activation = reader["x"][0]
        with pytest.raises(ValueError, match=r"nan is no value of torch\.int64: pass another"):
            activation.to_dense()
        assert activation.to_dense(dtype="float64").isnan().sum() == 5
        whole = reader["whole"][0]
        assert whole.positions is None and whole.source_shape == (3,)
        assert whole.to_dense().tolist() == [0, 1, 2]


def test_parameters_that_do_not_fit_are_reported(path):
    with capturing(path) as put:
        put("x", torch.ones(3), transform=b"sample", parameters=b'{"rate": 2}')
        put("y", torch.ones(3), transform=b"sample")
        put_sample(put, "z", torch.ones(8), 0.5)
    rewrite_index(path, lambda rows: rows[2].update(parameters=parameters_json((80,), 0.5)))
    with ActivationReader(path) as reader:
        for name in "xy":
            with pytest.raises(CorruptError, match=f"'{name}' .*not the parameters of a sample"):
                reader[name][0].to_dense()
            assert reader[name][0].to_torch().tolist() == [1, 1, 1]
        with pytest.raises(
            CorruptError, match=r"4 values, a part of a tensor of shape \(80,\) has 40"
        ):
            reader["z"][0].to_dense()


# ---- split tensors --------------------------------------------------------------

# The library splits only tensors of 4 GiB or more. These tests capture small tensors and rewrite
# the index, so that tensors of one name become the parts of one split tensor.


@pytest.fixture
def split(path):
    """Captures a tensor in three parts with other packets between them; returns the tensor."""
    whole = torch.randn(10, 4).to(torch.bfloat16)
    with capturing(path) as put:
        put("before", torch.ones(1))
        for part in whole.split(4):
            put("big", part, step=1)
            put("between", torch.ones(1), step=1)

    def join(rows):
        parts = [row for row in rows if row["layer"] == "big"]
        for number, row in enumerate(parts):
            row.update(part=number, parts=len(parts), shape=[10, 4])

    rewrite_index(path, join)
    return whole


def test_the_parts_of_a_split_tensor_are_joined(path, split):
    with ActivationReader(path) as reader:
        assert reader.problem == "" and reader.info.scanned == 0
        assert [a.name for a in reader] == ["before", "big", *["between"] * 3]
        assert len(reader) == 5 and len(reader["big"]) == 1
        activation = reader["big"].at(step=1)
        assert activation.shape == (10, 4)
        assert bits(activation.to_torch()) == bits(split)
        np.testing.assert_array_equal(activation.to_numpy(), split.float().numpy())
        assert bits(reader["big"].stack()) == bits(split)
        lengths = [row["length"] for row in reader.index.to_pylist() if row["layer"] == "big"]
        assert activation.stored_bytes == sum(lengths) - 3 * (6 + len("big"))


def test_spans_of_a_split_tensor_are_read_across_its_parts(path, split):
    with ActivationReader(path) as reader:
        snapshot, row = reader._snapshot, reader["big"][0].row
        flat = split.float().numpy().reshape(-1)
        spans = np.array([[14, 20], [0, 3], [39, 1], [16, 0], [15, 1]])  # parts begin at 0, 16, 32
        found = snapshot.read_spans(snapshot.form(row, True, None), spans)
        np.testing.assert_array_equal(found, np.concatenate([flat[a : a + n] for a, n in spans]))


def test_a_split_tensor_that_lacks_a_part_is_missing(path, split):
    data = path.read_bytes()
    second = data.index(b"big", data.index(b"big") + 1)
    path.write_bytes(data[:second] + b"odd" + data[second + 3 :])
    rewrite_index(path, lambda rows: rows[3].update(layer="odd", part=0, parts=1, shape=[4, 4]))
    with ActivationReader(path) as reader:
        assert "big" not in reader
        assert bits(reader["odd"][0].to_torch()) == bits(split[4:8])
        assert [m.error for m in reader.missing] == ["of its 3 parts 1 are in the stream"] * 2
        with pytest.raises(KeyError, match=r"as it is missing: of its 3 parts"):
            reader["big"]
        with pytest.raises(NotFoundError, match="'big' is not in"):
            reader.missing[0].to_torch()


@pytest.mark.parametrize("shape", [[11, 4], [-10, -4], [2**62, 4]])
def test_parts_that_do_not_make_the_shape_are_corrupt(path, split, shape):
    def wrong(rows):
        for row in rows:
            if row["layer"] == "big":
                row["shape"] = shape

    rewrite_index(path, wrong)
    with ActivationReader(path) as reader:
        offset = reader.index["offset"][1].as_py()
        with pytest.raises(CorruptError, match=f"'big' at byte {offset}: it holds 80 bytes"):
            reader["big"][0].to_torch()


def test_split_twins_are_joined(path):
    values = torch.arange(12.0) + 1e6
    data, rows = [], []
    with capturing(path) as put:
        for part in values.split(5):
            put("x", part)

    # A split tensor has all its float16 packets first, then the float32 ones.
    table = index_of(path)
    stream = path.read_bytes()
    for transform in (None, "overflow_float32"):
        parts = [row for row in table.to_pylist() if row["transform"] == transform]
        for number, row in enumerate(parts):
            packet = stream[row["offset"] : row["offset"] + row["length"]]
            row.update(part=number, parts=len(parts), shape=[12], sequence=len(rows))
            row["offset"] = sum(map(len, data))
            data.append(packet)
            rows.append(row)
    path.write_bytes(b"".join(data))
    with pa.ipc.new_stream(f"{path}.index", table.schema) as file:
        file.write_table(pa.Table.from_pylist(rows, schema=table.schema))

    with ActivationReader(path) as reader:
        assert reader.problem == "" and len(reader) == 1 and reader["x"][0].overflowed
        assert torch.equal(reader["x"][0].to_torch(), values)
        assert reader["x"][0].to_torch(exact=False).shape == (12,)


# ---- streams without an index ---------------------------------------------------


def packet(name, payload):
    name = name.encode()
    return struct.pack("!HI", len(name), len(payload)) + name + payload


ENCODE = {
    "none": bytes,
    "lz4": lz4.frame.compress,
    "zstd": zstandard.ZstdCompressor().compress,
}


@pytest.mark.parametrize("codec", ENCODE)
def test_a_documented_stream_without_an_index_is_read(path, codec):
    encode = ENCODE[codec]
    values = np.linspace(-1, 1, 24).astype(np.float16)
    ids = np.arange(7, dtype=np.int64)
    path.write_bytes(
        packet("h.0", encode(values.tobytes()))
        + packet("h.0[1]", encode(ids.tobytes()))
        + packet("h.0", encode(values[:3].tobytes()))
        + packet("odd", encode(b"abc"))
    )
    with ActivationReader(path, warn=False) as reader:
        assert reader.problem == "" and reader.steps == ()
        assert reader.layers == ("h.0", "h.0[1]", "odd")
        first = reader["h.0"][0]
        assert (first.shape, first.dtype, first.step, first.codec) == (None, None, None, codec)
        assert repr(first) == "<Activation 'h.0', shape unknown>"
        assert first.to_torch().dtype == torch.float16 and first.to_torch().shape == (24,)
        np.testing.assert_array_equal(first.to_numpy(), values)
        assert reader["h.0[1]"][0].to_torch(dtype="int64").tolist() == ids.tolist()
        assert reader["h.0[1]"][0].to_numpy(dtype=np.int64).tolist() == ids.tolist()
        assert reader["h.0"].cat().shape == (27,)
        assert len(reader.select(steps=0)) == 0
        with pytest.raises(ValueError, match="'odd' has 3 bytes, no whole number of float16"):
            reader["odd"][0].to_torch()
        assert reader["odd"][0].to_torch(dtype=torch.uint8).tolist() == list(b"abc")


def without_an_index(path) -> dict[str, torch.Tensor]:
    """Captures tensors to a stream, deletes its index, and returns the tensors."""
    tensors = {
        "h.0": torch.randn(6),
        "h.1": torch.randn(6).bfloat16(),
        "ids": torch.arange(6),
        "mask": torch.tensor([True, False, True]),
    }
    with capturing(path) as put:
        for name, tensor in tensors.items():
            put(name, tensor)
    os.unlink(f"{path}.index")
    return tensors


def test_unknown_types_warn_once_and_can_be_given(path):
    """Without an index or `dtypes`, float16 is assumed with a warning."""
    tensors = without_an_index(path)
    way_out = r"run\.stream: no index tells .*'h\.0', 'h\.1', 'ids', \.\.\..* float16.*dtypes="
    with pytest.warns(RuntimeWarning, match=way_out) as told:
        with ActivationReader(path) as reader:
            assert reader["ids"][0].dtype is None
            for name in ("h.0", "h.1", "ids"):
                reader[name][0].to_torch()
    assert len(told) == 1 and told[0].filename == __file__

    dtypes = {"*": torch.bfloat16, "h.0": "float16", "ids": np.int64, "mask": bool}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reader = ActivationReader(path, dtypes=dtypes)
    with reader:
        for name, tensor in tensors.items():
            stored = tensor.half() if tensor.dtype == torch.float32 else tensor
            activation = reader[name][0]
            assert activation.dtype == str(stored.dtype).removeprefix("torch.")
            assert torch.equal(activation.to_torch(), stored)
        assert repr(reader["ids"][0]) == "<Activation 'ids', int64>"
        # If the stored type is known, dtype= converts the values.
        converted = reader["h.1"][0].to_torch(dtype=torch.float32)
        assert torch.equal(converted, tensors["h.1"].float())
        assert reader.select("h.1").stack().dtype == torch.bfloat16


def test_given_types_are_checked(path):
    without_an_index(path)
    with pytest.raises(UnknownActivationError, match=r"no activation named 'h\.9'"):
        ActivationReader(path, dtypes={"h.9": "int8"})
    with pytest.raises(ValueError, match="'floaty': choose one of"):
        ActivationReader(path, dtypes={"*": "floaty"})
    with pytest.warns(RuntimeWarning, match="activations of 'mask':"):
        ActivationReader(path, dtypes={"h.*": "float16", "ids": "int64"}).close()


def test_types_in_the_index_beat_given_types(run):
    with ActivationReader(run) as reader, ActivationReader(run, dtypes={"*": "int8"}) as other:
        assert [a.dtype for a in other] == [a.dtype for a in reader]


def test_packets_behind_the_index_have_unknown_types(path):
    """A killed capture can leave packets that its index does not list."""
    with capturing(path) as put:
        put("x", torch.ones(3).bfloat16())
    path.write_bytes(2 * path.read_bytes())
    with pytest.warns(RuntimeWarning, match="activations of 'x':"):
        ActivationReader(path).close()
    with ActivationReader(path, dtypes={"x": "bfloat16"}) as reader:
        assert reader["x"].cat().tolist() == [1] * 6


def test_twins_are_known_by_name_without_an_index(path):
    tensor = torch.tensor([1.0, 1e6])
    with capturing(path) as put:
        put("x", torch.ones(2))
        put("x", tensor)
        put("y!float32", torch.ones(1))  # no twin, because there is no "y"
    with ActivationReader(path, ignore_index=True, warn=False) as reader:
        assert reader.layers == ("x", "y!float32") and not reader["x"][0].overflowed
        overflowed = reader["x"][1]
        assert overflowed.overflowed and overflowed.dtype == "float16"
        assert torch.equal(overflowed.to_torch(), tensor)
        assert torch.equal(overflowed.to_torch(exact=False), tensor.half())


def test_ignoring_the_index_finds_the_same_values(run):
    scanning = ActivationReader(run, ignore_index=True, warn=False)
    with ActivationReader(run) as indexed, scanning as scanned:
        assert scanned.layers == indexed.layers and len(scanned) == len(indexed)
        for one, other in zip(indexed, scanned, strict=True):
            values = one.to_torch()
            assert torch.equal(other.to_torch(dtype=values.dtype), values.reshape(-1))


# ---- missing or damaged packets -------------------------------------------------


def test_notes_are_no_activations(path):
    with capturing(path) as put:
        put("x", torch.ones(2), step=0)
        put.session.note(put.session.layer("x"), "a sparse tensor", step=1)
        put.session.note(put.session.layer("y"), "out of memory", step=1)
    with ActivationReader(path) as reader:
        assert len(reader) == 1 and reader.layers == ("x",) and reader.steps == (0,)
        assert [(m.name, m.step, m.error) for m in reader.missing] == [
            ("x", 1, "a sparse tensor"),
            ("y", 1, "out of memory"),
        ]
        assert "2 missing" in repr(reader) and "missing: a sparse" in repr(reader.missing[0])
        with pytest.raises(NotFoundError, match="a sparse tensor"):
            reader.missing[0].to_numpy()
        with pytest.raises(KeyError, match=r"as it is missing: out of memory"):
            reader["y"]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent\.stream") as raised:
        ActivationReader(tmp_path / "absent.stream")
    assert isinstance(raised.value, NotFoundError)


def test_a_foreign_file_is_refused(path):
    path.write_bytes(b"not a stream at all, but some text")
    with pytest.raises(CorruptError, match="is no stream"):
        ActivationReader(path)


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_a_flipped_bit_names_layer_and_offset(path, codec):
    with capturing(path, codec) as put:
        put("good", torch.randn(100))
        put("bad", torch.randn(100))
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(data)
    with ActivationReader(path) as reader:
        assert reader["good"][0].to_torch().shape == (100,)
        offset = reader.index["offset"][1].as_py()
        for read in (reader["bad"][0].to_torch, reader["bad"][0].to_numpy, reader["bad"].stack):
            with pytest.raises(CorruptError, match=f'"bad" at byte {offset}: '):
                read()


def test_reading_goes_on_after_a_corrupt_packet(path):
    with capturing(path, "lz4") as put:
        for step in range(4):
            put("h", torch.full((5000,), float(step)), step=step)
    with ActivationReader(path) as reader:
        offset = reader.index["offset"][1].as_py()
    data = bytearray(path.read_bytes())
    data[offset + 6 + len("h") + 4] = 0xFF  # the flags of its LZ4 frame
    path.write_bytes(data)
    values, errors = {}, {}
    with ActivationReader(path) as reader:
        for activation in reader:
            try:
                values[activation.step] = activation.to_torch()[0].item()
            except CorruptError as error:
                errors[activation.step] = str(error)
    assert values == {0: 0.0, 2: 2.0, 3: 3.0}
    assert list(errors) == [1] and f'"h" at byte {offset}: ' in errors[1]


def test_a_torn_tail_warns_once(run):
    run.write_bytes(run.read_bytes()[:-3])
    with pytest.warns(RuntimeWarning, match=r"run\.stream: the stream ends before 1") as seen:
        reader = ActivationReader(run)
    assert len(seen) == 1 and seen[0].filename == __file__
    with reader:
        assert len(reader) == 15 and "problem: the stream ends" in repr(reader)
        assert reader["h.0"][-1].to_torch().unique().item() == 3.5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ActivationReader(run, warn=False).close()
        with pytest.raises(RuntimeWarning):
            ActivationReader(run)


def test_a_closed_reader_says_so(run):
    with ActivationReader(run) as reader:
        activation = reader["h.0"][0]
    reader.close()  # does nothing
    for read in (activation.to_torch, activation.to_numpy, reader[""].stack):
        with pytest.raises(InvalidStateError, match=r"the reader of .*run\.stream is closed"):
            read()
    assert activation.step == 0 and len(reader.index) == 16
    assert repr(reader).endswith("closed>")


def test_every_call_of_a_reader_that_another_thread_closed_says_so(run):
    """The call may have begun before the reader was closed, so it reaches the library."""
    reader = Reader(run)
    reader.close()
    numbers, ends = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
    for call in (
        reader.follow,
        lambda: reader.decoded_bytes(0),
        lambda: reader.read_into(0, ends.ctypes.data, 8),
        lambda: reader.read_many(numbers, ends.ctypes.data, 8, ends),
        lambda: reader.read_ranges(np.zeros((1, 4), np.uint64), ends.ctypes.data, 8),
        lambda: reader.prefetch(numbers),
        reader.index,
        lambda: reader.index("step"),
    ):
        with pytest.raises(InvalidStateError, match=r"the reader of .*run\.stream is closed"):
            call()


def test_a_stream_that_is_being_captured_is_read_without_a_warning(path):
    with capturing(path) as put:
        for step in range(3):
            put("h.0", torch.full((2, 3), float(step)), step=step)
            put.session.checkpoint()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with ActivationReader(path) as reader:
                    assert reader.info.live and "being captured" in repr(reader)
                    assert reader["h.0"].stack().shape == (step + 1, 2, 3)
        data, index = path.read_bytes(), path.with_name("run.stream.index").read_bytes()
    with ActivationReader(path) as reader:
        assert not reader.info.live and reader.problem == ""
    # The files of a killed capture still give a warning.
    path.with_name("run.stream.index").write_bytes(index)
    with pytest.warns(RuntimeWarning, match="the end mark is missing"):
        ActivationReader(path).close()
    path.write_bytes(data[:-3])
    with pytest.warns(RuntimeWarning, match="the stream ends before 1 packets"):
        ActivationReader(path).close()


# ---- protocols ------------------------------------------------------------------


def test_numpy_takes_an_activation_for_an_array(crowd):
    with ActivationReader(crowd) as reader:
        half, rounded = reader["h.0"][1], reader["h.1"][1]
        values = np.asarray(half)
        assert values.dtype == np.float16 and values.shape == half.shape == (1, 2, 8)
        assert np.array_equal(values, half.to_numpy())
        assert np.asarray(half, dtype=np.float64).dtype == np.float64
        assert np.array_equal(np.abs(half), abs(values)) and np.mean(half) == values.mean()
        if np.lib.NumpyVersion(np.__version__) >= "1.25.0":  # before, only of sequences
            assert np.array([half, half]).shape == (2, 1, 2, 8)
        # numpy has no bfloat16; float32 holds all its values
        exact = rounded.to_torch()
        assert np.asarray(rounded).dtype == np.float32
        assert torch.equal(torch.from_numpy(np.asarray(rounded)).bfloat16(), exact)
        assert np.array(half, copy=True).flags.writeable
        with pytest.raises(ValueError, match="'h.0', step 1.* is decoded anew each time"):
            half.__array__(copy=False)
        with pytest.raises(ValueError, match="dtype"):
            np.asarray(half, dtype=object)
    with pytest.raises(InvalidStateError):
        np.asarray(half)


def test_numpy_takes_a_view_for_an_array(crowd):
    with ActivationReader(crowd) as reader:
        view = reader["h.0"][::3]
        assert np.array_equal(np.asarray(view), view.stack().numpy())
        assert np.asarray(reader["h.1"][::3]).dtype == np.float32
        assert np.asarray(view, dtype="int32").dtype == np.int32
        twins = reader["lm"][1::3]  # float16 and float32
        assert np.array_equal(np.asarray(twins), twins.stack().numpy())
        with pytest.raises(ValueError, match=r"cannot stack 200 activations of \(1, 1, 8\)"):
            np.asarray(reader["h.0"])
        with pytest.raises(ValueError, match="cannot join .*bfloat16"):
            np.asarray(reader.select(["h.0", "h.1"], steps=3))
        with pytest.raises(ValueError, match="the selection is empty"):
            np.asarray(reader.select(steps=10**6))
        with pytest.raises(ValueError, match="is decoded anew"):
            view.__array__(copy=False)


def test_an_activation_is_handed_over_by_dlpack(crowd):
    with ActivationReader(crowd) as reader:
        for name in ("h.0", "h.1", "h.1[1]", "long"):
            activation = reader[name][1]
            assert activation.__dlpack_device__() == (1, 0)
            tensor = torch.from_dlpack(activation)
            assert tensor.dtype == activation.to_torch().dtype
            assert bits(tensor) == bits(activation.to_torch())
        assert np.array_equal(np.from_dlpack(reader["h.0"][1]), reader["h.0"][1].to_numpy())
        with pytest.raises(BufferError, match="is decoded anew"):
            reader["h.0"][1].__dlpack__(copy=False)


def test_the_index_rows_of_a_view_are_a_pandas_table(crowd):
    with ActivationReader(crowd) as reader:
        view = reader.select("h.1*", steps=slice(3, 6))
        table = view.to_pandas()
        assert table["name"].tolist() == ["h.1", "h.1[1]"] * 3
        assert table["step"].tolist() == [3, 3, 4, 4, 5, 5]
        assert table.index.name == "row" and table.index.tolist() == [a.row for a in view]
        assert list(table.columns) == ["name", *reader.index.column_names]
        assert reader.missing.to_pandas().empty
    assert len(view.to_pandas()) == 6  # works after the reader is closed


def test_a_missing_pandas_is_named(crowd, monkeypatch):
    with ActivationReader(crowd) as reader:
        monkeypatch.setitem(sys.modules, "pandas", None)
        with pytest.raises(UnsupportedError, match="to_pandas needs pandas") as raised:
            reader["h.0"].to_pandas()
        assert isinstance(raised.value, ImportError) and raised.value.name == "pandas"


def test_the_data_of_the_index_outlives_the_reader(crowd):
    with ActivationReader(crowd) as reader:
        wanted = reader.index.select(["time_ns", "codec", "mse", "call"]).to_pylist()
    with ActivationReader(crowd) as reader:
        activations = list(reader)
        assert activations[0].codec == "lz4"
    for activation in activations:
        row = wanted[activation.row]
        assert (activation.time_ns, activation.codec, activation.call) == (
            row["time_ns"], row["codec"], row["call"],
        )  # fmt: skip
        assert activation.mse == row["mse"] and activation.shape is not None
    assert reader.index.num_rows == len(wanted) and len(reader["h.0"].select(steps=3)) == 1


def test_reading_arrays_imports_neither_torch_nor_pandas(crowd):
    code = (
        "import sys; from llm_instrumentation import ActivationReader\n"
        "with ActivationReader(sys.argv[1]) as reader:\n"
        "    reader['h.0'].at(step=3).to_numpy(), reader.steps, reader['h.0'][0].mse\n"
        "print({'pandas', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, crowd], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"


def test_a_forgotten_reader_closes_its_file(run):
    before = len(os.listdir("/proc/self/fd"))
    reader = ActivationReader(run)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    del reader
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_empty_stream_has_nothing(path):
    with capturing(path):
        pass
    with ActivationReader(path) as reader:
        assert len(reader) == 0 and reader.layers == reader.steps == () == tuple(reader.missing)
        assert reader.index.num_rows == 0 and list(reader.select()) == []
        assert repr(reader).endswith("0 activations, 0 layers, 0 steps, 0 packets, 0 B>")
        assert repr(reader.select()) == "<ActivationView: 0 activations of 0 layers>"


# ---- the rest -------------------------------------------------------------------


def test_the_index_is_a_table_for_other_tools(run):
    with ActivationReader(run) as reader:
        index = reader.index
    query = "select path, count(*), max(step), sum(len(shape)) from index_rows group by path"
    with duckdb.connect() as database:
        database.register("index_rows", index)
        assert sorted(database.execute(query).fetchall()) == [("", 12, 3, 24), ("[1]", 4, 3, 8)]
    assert index.to_pandas()["layer"].nunique() == 2


def test_a_compressed_index_is_read_by_other_tools(crowd):
    with open(f"{crowd}.index", "rb") as file:
        table = pa.ipc.open_stream(file).read_all()
    assert table.schema.metadata[b"version"] == b"4"
    assert os.path.getsize(f"{crowd}.index") < table.nbytes / 2
    with ActivationReader(crowd) as reader:
        assert table.equals(reader.index)
    with open(f"{crowd}.index", "rb") as file, duckdb.connect() as database:
        database.register("index_rows", pa.ipc.open_stream(file))
        query = "select layer, count(*), max(step) from index_rows where path = '' group by layer"
        found = sorted(database.execute(query).fetchall())
    counts = {"empty": 200, "h.0": 200, "h.1": 200, "lm": 204, "long": 200}
    assert found == [(layer, count, 199) for layer, count in counts.items()]


def test_chosen_columns_equal_those_of_the_whole_index(crowd):
    with Reader(crowd) as native:
        table = native.index().read_all()
        some = native.index("layer", "step", "transform", "crc32c").read_all()
    assert pa.types.is_dictionary(some["layer"].type)
    for name in some.column_names:
        assert some[name].to_pylist() == table[name].to_pylist(), name


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(steps=st.lists(st.integers(0, 2**62) | st.integers(0, 3), min_size=1, max_size=20))
def test_any_step_number_comes_back(tmp_path_factory, steps):
    path = tmp_path_factory.mktemp("steps") / "run.stream"
    with capturing(path) as put:
        for step in steps:
            put("x", torch.ones(2), step=step)
    with ActivationReader(path) as reader:
        assert [a.step for a in reader] == steps
        assert reader.steps == tuple(sorted(set(steps)))


def test_the_token_file_comes_with_the_capture(run):
    content = {"total_tokens": 0, "tokens": [], "capture_duration_seconds": 1.5}
    run.with_name("run_tokens.json").write_text(json.dumps(content))
    with ActivationReader(run) as reader:
        assert reader.token_metadata == content


def test_models_of_one_capture_are_told_apart(path):
    with capturing(path) as put:
        put("h", torch.tensor([1e6]), model="a")
        put("h", torch.tensor([2e6]), model="b")
    with ActivationReader(path) as reader:
        assert {a.model: a.to_torch().item() for a in reader["h"]} == {"a": 1e6, "b": 2e6}


def test_threads_read_at_once(path):
    tensors = torch.randn(200, 50).half()
    with capturing(path) as put:
        for tensor in tensors:
            put("x", tensor)
    results = [None] * 4
    with ActivationReader(path) as reader:

        def read(n):
            results[n] = reader["x"][n::4].stack()

        threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(result, tensors[n::4]) for n, result in enumerate(results))
