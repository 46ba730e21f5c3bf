"""Figures of captures show the numbers of `views`, `attention`, `logit_lens` and `compare`."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from causal_graphs import induction
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from llm_instrumentation import InstrumentationConfig, capture_activations
from llm_instrumentation._native import DTYPE_CODES, Session
from llm_instrumentation._pages import drawing
from llm_instrumentation.analysis import plots
from llm_instrumentation.analysis.attention import attention_weights
from llm_instrumentation.analysis.compare import compare_captures
from llm_instrumentation.analysis.figures import canvas
from llm_instrumentation.analysis.logit_lens import logit_lens
from llm_instrumentation.analysis.sae.folder import LOSSES
from llm_instrumentation.analysis.sparse_autoencoder import (
    Feature,
    FeatureContext,
    TokenEffect,
    plot_feature,
    plot_losses,
)
from llm_instrumentation.analysis.views import (
    layer_statistics,
    massive_activations,
    token_errors,
    token_norms,
)  # fmt: skip
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.probes import plot_timeline
from matplotlib import font_manager
from matplotlib.figure import Figure
from matplotlib.text import Text
from torch import nn

WORDS = ["one", "two", "$a_1$", "vier", "\n", "🦙"]


class Tokenizer:
    @staticmethod
    def decode(ids):
        return WORDS[ids[0]]


class Block(nn.Module):
    """Attention with two heads that returns its weights, as modules of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        mixed, weights = self.attention(x, x, x, average_attn_weights=False)
        return x + mixed, weights


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 8)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 6)

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(self.norm(x))


@pytest.fixture(autouse=True)
def no_display(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "Agg")
    plt.switch_backend("Agg")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # as for a missing glyph
        # Of pyparsing 3.3, about matplotlib's calls of it: it is a UserWarning too.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
    plt.close("all")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def captures(model, tmp_path_factory):
    """A model in float32, and the same with a changed layer in bfloat16."""
    folder = tmp_path_factory.mktemp("captures")
    config = InstrumentationConfig.max().with_float32()
    torch.manual_seed(0)
    changed = Model().eval()
    with torch.no_grad():
        changed.layers[1].attention.out_proj.weight *= 2
        for name, one in (("a", model), ("b", changed.to(torch.bfloat16))):
            with capture_activations(one, folder / f"{name}.stream", config=config):
                one(torch.arange(6)[None])
    return folder / "a.stream", folder / "b.stream"


def texts(labels):
    return [label.get_text() for label in labels]


def shown(ax):
    """The matrix of a heat map."""
    (image,) = ax.images
    return np.ma.filled(image.get_array().astype(float), np.nan)


LABELS = ["one", "two", "$a_1$", "vier", "\\n", "\\U0001f999"]


def test_attention_of_a_head_and_of_all(captures):
    found = attention_weights(captures[0], 1)
    ax = plots.plot_attention(captures[0], "layers.1", head=1, tokenizer=Tokenizer)
    np.testing.assert_array_equal(shown(ax), found.weights[1])
    assert texts(ax.get_xticklabels()) == texts(ax.get_yticklabels()) == LABELS
    mean = plots.plot_attention(captures[0], 1)
    np.testing.assert_allclose(shown(mean), found.weights.mean(axis=0))
    with pytest.raises(InvalidArgumentError, match="head = 2: .* has 2, from 0"):
        plots.plot_attention(captures[0], 1, head=2)
    figure = plots.plot_attention_heads(captures[0], 1, tokenizer=Tokenizer)
    maps = [ax for ax in figure.axes if ax.images and ax.get_title(loc="left")]
    assert [ax.get_title(loc="left") for ax in maps] == ["head 0", "head 1"]
    np.testing.assert_array_equal([shown(ax) for ax in maps], found.weights)


def test_the_logit_lens_has_a_word_in_each_cell(captures, model):
    lens = logit_lens(captures[0], model, tokenizer=Tokenizer)
    ax = plots.plot_logit_lens(captures[0], model, tokenizer=Tokenizer)
    np.testing.assert_array_equal(shown(ax), lens.probabilities)
    assert len(ax.texts) == 1 + lens.ids.size  # and the remark
    assert ax.texts[0].get_text() == drawing.shown(lens.texts[0][0], 10)
    assert texts(ax.get_yticklabels()) == ["0", "1", "2"]
    assert ax.get_ylabel() == "layers"


def test_norms_and_errors_of_tokens(captures):
    norms = plots.plot_token_norms(captures[0], ["embed", "layers.?"], tokenizer=Tokenizer)
    expected = token_norms(captures[0], ["embed", "layers.?"])
    np.testing.assert_array_equal(shown(norms), expected.values)
    assert texts(norms.get_yticklabels()) == ["embed", "layers.0", "layers.1", "layers.2"]
    (image,) = norms.images
    colors = image.cmap(image.norm([expected.values.min(), expected.values.max()]))
    small, large = colors[:, :3] @ [0.2126, 0.7152, 0.0722]  # luminance
    assert large > 3 * small
    (remark,) = texts(norms.texts)
    assert re.fullmatch(
        "large norms are bright; one (linear|logarithmic) scale of colours for all layers", remark
    )
    errors = plots.plot_token_errors(*captures)
    np.testing.assert_array_equal(shown(errors), token_errors(*captures).values)


def test_outliers_have_their_place(captures):
    found = massive_activations(captures[0], tokenizer=Tokenizer)
    ax = plots.plot_massive_activations(captures[0], tokenizer=Tokenizer)
    largest, second, third, median = ax.lines
    for nth, line in enumerate((largest, second, third)):
        expected = [abs(of_layer[nth].value) for of_layer in found.largest]
        np.testing.assert_array_equal(line.get_xdata(), expected)
    np.testing.assert_array_equal(median.get_xdata(), found.median)
    first = found.largest[0][0]
    assert f"channel {first.channel}, {drawing.shown(first.token)}" in texts(ax.texts)
    ringed = plots.plot_massive_activations(captures[0], min_magnitude=0, min_ratio=0)
    assert len(ringed.lines) == 4 + 9
    assert ringed.get_title(loc="left") == "Largest activations, 9 of them massive"


def test_ranges_of_layers(captures):
    ax = plots.plot_layer_statistics(captures[0])
    found = layer_statistics(captures[0])
    (mean,) = ax.lines
    np.testing.assert_array_equal(mean.get_xdata(), [one.mean for one in found])
    ends = [segment[:, 0].tolist() for segment in ax.collections[0].get_segments()]
    assert ends == [[one.min, one.max] for one in found]


def test_the_error_of_each_layer(captures):
    comparison = compare_captures(*captures, "layers.?")
    ax = plots.plot_drift(comparison)
    assert ax.get_xscale() == "log"
    errors = [layer.relative_error for layer in comparison.layers]
    within, beyond = (
        next(line for line in ax.lines if line.get_label() == label)
        for label in ("within the tolerance", "beyond it")
    )
    np.testing.assert_allclose(within.get_xdata(), errors[:1])
    np.testing.assert_allclose(beyond.get_xdata(), errors[1:])
    assert list(beyond.get_ydata()) == [1, 2]
    assert comparison.first.layer == "layers.1"
    (first,) = (text for text in ax.texts if text.get_text() == "first")
    assert first.xy[1] == 1


def test_captures_without_any_difference_have_no_error_to_draw(captures, tmp_path):
    comparison = compare_captures(captures[0], captures[0])
    ax = plots.plot_drift(comparison)
    count = len(comparison.layers)
    assert texts(ax.texts) == ["no layer differs", f"{count} of {count} layers are equal"]
    assert not ax.lines
    plots.save_figure(ax, tmp_path / "drift.png")


def test_equal_layers_are_left_out_and_counted_and_no_marker_is_cut(tmp_path):
    paths = []
    for name, values in (("a", [0.0, 1.0, 1.0]), ("b", [1.0, 1.0, 2.0])):
        paths.append(tmp_path / f"{name}.stream")
        session = Session(paths[-1], codec="lz4", workers=1, max_memory_bytes=16 << 20)
        for step, value in enumerate(values):
            tensor = torch.full((3,), value)
            layer = session.layer(f"layer.{step}", "", "")
            code = DTYPE_CODES["float32"]
            assert session.enqueue(layer, code, (3,), tensor.data_ptr(), step=step)
            session.flush()
        session.close()
    comparison = compare_captures(*paths)
    assert [layer.relative_error for layer in comparison.layers] == [np.inf, 0.0, 1.0]
    ax = plots.plot_drift(comparison)
    high = ax.get_xlim()[1]
    (line,) = (line for line in ax.lines if line.get_label() == "beyond it")
    np.testing.assert_allclose(line.get_xdata(), [high, 1.0])
    assert not line.get_clip_on()  # the frame would cut the marker of the infinite error
    assert "infinite" in texts(ax.texts)
    assert ax.get_title(loc="left") == "Error of each layer that differs; 1 of 3 are equal"
    assert texts(ax.get_yticklabels()) == ["0", "2"]
    (path,) = (line for line in ax.lines if np.isnan(line.get_xdata()).any())
    np.testing.assert_allclose(path.get_xdata(), [high, np.nan, 1.0])  # a gap for layer 1
    with pytest.raises(InvalidArgumentError, match="no tensors of .* could be compared"):
        plots.plot_drift(compare_captures(*paths, "layer.0", steps=1))


def test_axes_that_are_given_are_used_and_settings_are_kept(captures, model):
    before = dict(matplotlib.rcParams)
    axes = iter(Figure(figsize=(9, 9)).subplots(7).tolist())
    for draw in (
        plots.plot_attention, plots.plot_token_norms, plots.plot_massive_activations,
        plots.plot_layer_statistics,
    ):  # fmt: skip
        ax = next(axes)
        assert draw(captures[0], ax=ax) is ax
    ax = next(axes)
    assert plots.plot_token_errors(*captures, ax=ax) is ax
    ax = next(axes)
    assert plots.plot_drift(compare_captures(*captures), ax=ax) is ax
    ax = next(axes)
    assert plots.plot_logit_lens(captures[0], model, ax=ax) is ax
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize(
    ("suffix", "magic"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")]
)
def test_files_for_print(captures, tmp_path, suffix, magic):
    ax = plots.plot_token_norms(captures[0], tokenizer=Tokenizer)
    path = tmp_path / f"norms.{suffix}"
    plots.save_figure(ax, path)
    assert path.read_bytes().startswith(magic)
    again = tmp_path / "again" / path.name
    plots.save_figure(plots.plot_token_norms(captures[0], tokenizer=Tokenizer).figure, again)
    assert again.read_bytes() == path.read_bytes()
    with pytest.raises(InvalidArgumentError, match=r"norms\.gif: figures are written as png"):
        plots.save_figure(ax, tmp_path / "norms.gif")


def test_labels_that_have_no_room_are_left_out():
    layers = [f"model.layers.{n}" for n in range(400)]
    assert canvas.layer_labels(layers) == ([str(n) for n in range(400)], "model.layers")
    assert canvas.layer_labels(["", "a.0"]) == (["<root>", "a.0"], "Layer")
    ax = Figure(figsize=(4, 4)).subplots()
    canvas.heat_map(ax, np.zeros((400, 2)), canvas.SHARES, "x")
    canvas.layers_on_y(ax, layers)
    labels = texts(ax.get_yticklabels())
    assert 10 < len(labels) < 40
    assert labels[0] == "0"
    assert int(labels[1]) == ax.get_yticks()[1]


# ---- texts ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "drawn"),
    [
        ("Ġthe", "Ġthe"),  # byte-level BPE writes a space so
        ("Ċ", "Ċ"),
        ("▁the", "▁the"),  # SentencePiece
        ("a\x00\n", "a\\x00\\n"),
        ("中文", "\\u4e2d\\u6587"),
        ("🦙", "\\U0001f999"),
        ("\ud83e", "\\ud83e"),
    ],
)
def test_a_character_that_no_font_has_is_an_escape(text, drawn, monkeypatch):
    monkeypatch.setattr(drawing, "_FALLBACKS", ())
    assert drawing.shown(text) == drawn


def test_no_escape_is_cut_in_two(monkeypatch):
    monkeypatch.setattr(drawing, "_FALLBACKS", ())
    assert drawing.shown("abcdefghij", 5) == "ab…ij"
    assert drawing.shown("中文模型", 14) == "\\u4e2d…\\u578b"
    assert drawing.shown("🦙", 5) == "\\U0001f999"


def test_another_installed_font_draws_what_the_first_lacks(captures, tmp_path, monkeypatch):
    font = font_with("中", "Test Han", tmp_path / "han.ttf")
    monkeypatch.setattr(drawing, "_FALLBACKS", ("Test Han", "Not Installed"))
    assert drawing.shown("中文") == "\\u4e2d\\u6587"
    monkeypatch.setattr(font_manager.fontManager, "ttflist", font_manager.fontManager.ttflist[:])
    font_manager.fontManager.addfont(font)
    assert drawing.shown("中文") == "中\\u6587"
    monkeypatch.setattr(Tokenizer, "decode", staticmethod(lambda ids: "中"))
    ax = plots.plot_token_norms(captures[0], tokenizer=Tokenizer)
    assert set(texts(ax.get_xticklabels())) == {"中"}
    plots.save_figure(ax, tmp_path / "norms.pdf")
    assert b"TestHan" in (tmp_path / "norms.pdf").read_bytes()


def font_with(letter: str, family: str, path: Path) -> Path:
    """A font that has a square for one character."""
    names = [".notdef", "one"]
    pen = TTGlyphPen(None)
    for at, point in enumerate([(0, 0), (0, 800), (800, 800), (800, 0)]):
        (pen.lineTo if at else pen.moveTo)(point)
    pen.closePath()
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord(letter): "one"})
    builder.setupGlyf(dict.fromkeys(names, pen.glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys(names, (1000, 0)))
    builder.setupHorizontalHeader(ascent=800, descent=-200)
    builder.setupNameTable({
        "familyName": family, "styleName": "Regular", "psName": family.replace(" ", "")
    })  # fmt: skip
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    return path


# ---- the style ------------------------------------------------------------------------------


def figures_of_the_package(captures, tmp_path):
    """Figures of all parts that draw, by name."""
    yield "norms", plots.plot_token_norms(captures[0], tokenizer=Tokenizer).figure
    yield "attention", plots.plot_attention_heads(captures[0], 1, tokenizer=Tokenizer)
    yield "drift", plots.plot_drift(compare_captures(*captures)).figure
    yield "circuit", induction().plot().figure
    losses = pa.table({"h.0": np.geomspace(9, 1, 600), "模型": np.geomspace(5, 1, 600)})
    pq.write_table(losses, tmp_path / LOSSES)
    yield "losses", plot_losses(tmp_path)
    contexts = [
        FeatureContext(0, 3.0, 1, 0, 3, None, [1, 2, 3], ["Ġa", "中文", "🦙\n"], [0.0, 3.0, 1.0])
    ]
    effects = [TokenEffect(1, "模", 0.5), TokenEffect(2, "▁b", -0.25)]
    histogram = [0] * 30 + [4, 0, 2] + [0] * 33
    feature = Feature("h.0", 7, 6, 0.25, 3.0, histogram, contexts, effects[:1], effects[1:])
    yield "feature", plot_feature(feature)
    table = pd.DataFrame(
        {
            **dict.fromkeys(["captured_mb_s", "file_mb_s", "disk_mb_s"], 1000.0),
            **dict.fromkeys(["stall_share", "write_share", "write_blocked_share"], 0.75),
            **dict.fromkeys(["io_pressure", "memory_pressure", "cpu_pressure"], 0.25),
            "cpu_throttled_share": np.nan, "interval_s": 0.25, "bottleneck": ["disk", ""],
            "disk_mean_us": [2100.0, 2300.0], "disk_p99_us": [9000.0, 20000.0],
        },
        index=[0.25, 0.5],
    )  # fmt: skip
    yield "timeline", plot_timeline(table)


def test_all_figures_have_one_style_that_the_users_settings_leave_alone(captures, tmp_path):
    def drawn():
        for name, figure in figures_of_the_package(captures, tmp_path):
            out = io.BytesIO()
            figure.savefig(out, format="png", metadata={"Software": None})
            yield name, figure, out.getvalue()

    plain = {}
    for name, figure, picture in drawn():
        plain[name] = picture
        written = [text for text in figure.findobj(Text) if text.get_text().strip()]
        fonts = {family for text in written for family in text.get_fontfamily()}
        assert fonts <= {*drawing.families(), "DejaVu Sans Mono"}, name
        sizes = {text.get_fontsize() for text in written}
        assert sizes <= {5.5, 6, 6.5, 7, 7.5, 8, 9, 9.5}, name
        assert not [text for text in written if "□" in text.get_text()], name
    users = {
        "font.size": 33.0, "font.family": "serif", "axes.facecolor": "black", "grid.color": "red",
        "xtick.labelsize": 30, "ytick.color": "red", "lines.linewidth": 9,
    }  # fmt: skip
    with matplotlib.rc_context(users):
        assert [name for name, _, picture in drawn() if picture != plain[name]] == []


def test_rates_and_times_have_their_units(captures, tmp_path):
    figure = dict(figures_of_the_package(captures, tmp_path))["timeline"]
    figure.draw_without_rendering()
    rates, _, latency, _ = figure.axes
    assert texts(rates.get_yticklabels()) == ["0 B", "500 MiB", "1000 MiB"]
    assert all(re.fullmatch(r"\d+ ms", text) for text in texts(latency.get_yticklabels()))
