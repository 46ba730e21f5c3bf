"""ActivationReader reads streams that lack their index, are damaged, or are being written."""

from __future__ import annotations

import os
import struct
import warnings

import lz4.frame
import numpy as np
import pytest
import torch
import zstandard
from llm_instrumentation import ActivationReader
from llm_instrumentation._native import Reader
from llm_instrumentation.analysis import UnknownActivationError
from llm_instrumentation.errors import CorruptError, InvalidStateError, NotFoundError
from small_captures import capturing

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
