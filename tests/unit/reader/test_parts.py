"""ActivationReader reads samples of tensors, and tensors that are split over several packets."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch
from llm_instrumentation import ActivationReader
from llm_instrumentation.core.sampling import parameters_json, sample_positions
from llm_instrumentation.errors import CorruptError, NotFoundError
from small_captures import DTYPES, bits, capturing, index_of, rewrite_index

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
