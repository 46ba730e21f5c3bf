"""What ActivationReader hands to numpy, pandas, DLPack and readers of Arrow."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import duckdb
import numpy as np
import pyarrow as pa
import pytest
import torch
from llm_instrumentation import ActivationReader
from llm_instrumentation._native import Reader
from llm_instrumentation.errors import InvalidStateError, UnsupportedError
from small_captures import bits, capturing


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


def test_the_token_file_comes_with_the_capture(run):
    content = {"total_tokens": 0, "tokens": [], "capture_duration_seconds": 1.5}
    run.with_name("run_tokens.json").write_text(json.dumps(content))
    with ActivationReader(run) as reader:
        assert reader.token_metadata == content
