"""Packets are loaded as records, turned into a table, and drawn."""

from __future__ import annotations

import math
import struct
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from llm_instrumentation import InstrumentationConfig, InstrumentationFramework
from llm_instrumentation.analysis import (
    ActivationReader,
    analyze_circuits,
    build_packet_dataframe,
    create_interactive_dashboard,
    load_stream_packets,
    plot_token_progression,
    visualize_attention_patterns,
)
from llm_instrumentation.core.token_files import load_token_metadata
from matplotlib.figure import Figure
from torch import nn


@pytest.fixture(autouse=True)
def no_display(monkeypatch):
    import matplotlib.pyplot as plt

    monkeypatch.setenv("MPLBACKEND", "Agg")
    plt.switch_backend("Agg")
    yield
    plt.close("all")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "gen.stream"


@pytest.fixture
def generation(path):
    """A capture of three tokens of a model with two layers; the second doubles its input."""

    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    model = nn.Sequential(nn.Identity(), Double())
    framework.instrument_model(model)
    with framework.capture_activations(path, track_per_token=True) as tracker:
        for n, text in enumerate(("The", " old", " dog")):
            model(torch.full((2, 3), float(n)))
            tracker.record_token(n, text)
    return path


def table_of(path) -> pd.DataFrame:
    return build_packet_dataframe(load_stream_packets(path), load_token_metadata(path))


def test_packets_have_the_tokens_of_the_index(generation):
    packets = load_stream_packets(generation)
    assert [p["layer_name"] for p in packets] == ["0", "1", "<root>"] * 3
    assert [p["token_index"] for p in packets] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    with ActivationReader(generation) as reader:
        for packet, activation in zip(packets, reader, strict=True):
            values = activation.to_torch().double()
            assert packet["l2_norm"] == pytest.approx(values.norm().item())
            assert packet["mean"] == packet["min"] == packet["max"] == values.mean()
            assert packet["std"] == 0
            assert packet["sparsity"] == float(packet["token_index"] == 0)
            assert packet["uncompressed_bytes"] == 12
            assert packet["compressed_bytes"] == activation.stored_bytes
    table = table_of(generation)
    assert list(table["token_text"][::3]) == ["The", " old", " dog"]
    assert (table["compression_ratio"] == 12 / table["compressed_bytes"]).all()


def older_stream(path, count, values=b"\x00\x3c" * 4) -> None:
    """Writes a stream like llm_instrumentation 1.3.1: without compression and index."""
    name = b"layer"
    packet = struct.pack("!HI", len(name), len(values)) + name + values
    path.write_bytes(packet * count)


def test_packets_without_an_index_are_divided_among_the_tokens(path):
    older_stream(path, 7)
    packets = load_stream_packets(path, compression="none")
    assert {p["mean"] for p in packets} == {1.0}
    metadata = {"total_tokens": 3, "tokens": [{"token_text": t} for t in "abc"]}
    table = build_packet_dataframe(packets, metadata)
    assert list(table["token_index"]) == [0, 0, 0, 1, 1, 2, 2]
    assert list(table["token_text"]) == list("aaabbcc")
    assert "token_index" not in build_packet_dataframe(packets)


def test_packets_that_cannot_be_decoded_are_left_out_with_a_warning(path):
    older_stream(path, 2, b"\x00\x3c\x00")  # three bytes are no whole number of float16
    with pytest.warns(RuntimeWarning, match=r"2 packets are left out, .* first is 'layer': .* 3 b"):
        assert load_stream_packets(path) == []
    packets = load_stream_packets(path, include_failed=True)
    assert all("3 bytes" in p["error"] and math.isnan(p["l2_norm"]) for p in packets)
    assert build_packet_dataframe([]).empty


def test_packets_of_another_codec_are_left_out_with_a_warning(generation):
    with pytest.warns(RuntimeWarning, match="9 packets are left out.*its codec is lz4, not zstd"):
        assert load_stream_packets(generation, compression="zstd") == []
    assert len(load_stream_packets(generation, "lz4")) == 9
    with pytest.raises(ValueError, match="'lzma' is none of lz4, zstd, none, archive"):
        load_stream_packets(generation, "lzma")
    with pytest.raises(ValueError, match="give the records of load_stream_packets"):
        build_packet_dataframe(str(generation))


def test_drawings_show_the_values_of_the_table(generation):
    table = table_of(generation)
    ax = plot_token_progression(table)
    (line,) = ax.lines
    means = table.groupby("token_index")["l2_norm"].mean()
    np.testing.assert_allclose(line.get_ydata(), means.to_numpy())
    assert [label.get_text() for label in ax.get_xticklabels()] == ["The", "old", "dog"]
    heat = visualize_attention_patterns(table, metric="mean")
    (image,) = heat.images
    np.testing.assert_allclose(image.get_array(), [[0, 0, 0], [1, 2, 2], [2, 4, 4]])
    assert [label.get_text() for label in heat.get_xticklabels()] == ["0", "1", "<root>"]
    given = Figure().subplots()
    assert plot_token_progression(table, ax=given) is given
    with pytest.raises(ValueError, match="no column 'norm' in the table: it has packet_index"):
        plot_token_progression(table, metric="norm")


def test_correlated_layers_are_found(generation):
    table = table_of(generation)
    table.loc[table["layer_name"] == "1", "l2_norm"] *= -1
    pairs = analyze_circuits(table)
    assert list(pairs.columns) == ["layer_a", "layer_b", "correlation"]
    assert [tuple(row[:2]) for row in pairs.to_numpy()] == [
        ("0", "<root>"),
        ("0", "1"),
        ("1", "<root>"),
    ]
    np.testing.assert_allclose(pairs["correlation"].astype(float), [1, -1, -1])
    assert len(analyze_circuits(table, top_k=1)) == 1
    assert analyze_circuits(table[table["layer_name"] == "0"]).empty
    with pytest.raises(ValueError, match="no packet has a token"):
        analyze_circuits(table.drop(columns="token_index"))


def test_the_dashboard_with_and_without_plotly(generation, monkeypatch):
    table = table_of(generation)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.warns(RuntimeWarning, match="plotly is not installed"):
        figure = create_interactive_dashboard(table)
    upper, lower = figure.axes
    np.testing.assert_allclose(upper.lines[0].get_ydata(), table["l2_norm"])
    assert len(lower.patches) == 3
    with pytest.raises(ValueError, match="no column 'x'"):
        create_interactive_dashboard(table, secondary_metric="x")
    monkeypatch.undo()
    pytest.importorskip("plotly", reason="plotly is not installed")
    line, bars = create_interactive_dashboard(table).data
    np.testing.assert_allclose(line.y, table["l2_norm"])
    assert sorted(bars.x) == ["0", "1", "<root>"]
