"""ActivationReader returns the values of activations, alone, in turn and joined."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llm_instrumentation import ActivationReader
from llm_instrumentation._native import DTYPE_SIZES
from llm_instrumentation.errors import CorruptError, InvalidStateError, UnsupportedError
from small_captures import DTYPES, bits, capturing, rewrite_index

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)


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


def test_a_damaged_packet_does_not_affect_the_packets_read_with_it(crowd, path):
    with ActivationReader(crowd) as reader:
        bad = reader["h.0"][100].row
        end = reader.index["offset"][bad].as_py() + reader.index["length"][bad].as_py()
    data = bytearray(crowd.read_bytes())
    data[end - 6] ^= 1
    path.write_bytes(data)
    shutil.copy(f"{crowd}.index", f"{path}.index")
    with ActivationReader(path) as reader:
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
