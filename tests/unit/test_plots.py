"""Figures of captures show the numbers of `views`, `attention`, `logit_lens` and `compare`."""

from __future__ import annotations

import warnings

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from llm_instrumentation import InstrumentationConfig, capture_activations
from llm_instrumentation._native import DTYPE_CODES, Session
from llm_instrumentation.analysis import _canvas, plots
from llm_instrumentation.analysis.attention import attention_weights
from llm_instrumentation.analysis.compare import compare_captures
from llm_instrumentation.analysis.logit_lens import logit_lens
from llm_instrumentation.analysis.views import (
    layer_statistics,
    massive_activations,
    token_errors,
    token_norms,
)  # fmt: skip
from llm_instrumentation.errors import InvalidArgumentError
from matplotlib.figure import Figure
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


LABELS = ["one", "two", "$a_1$", "vier", "\\n", "□"]


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
    assert ax.texts[0].get_text() == _canvas.shown(lens.texts[0][0])
    assert texts(ax.get_yticklabels()) == ["0", "1", "2"]
    assert ax.get_ylabel() == "layers"


def test_norms_and_errors_of_tokens(captures):
    norms = plots.plot_token_norms(captures[0], ["embed", "layers.?"], tokenizer=Tokenizer)
    expected = token_norms(captures[0], ["embed", "layers.?"])
    np.testing.assert_array_equal(shown(norms), expected.values)
    assert texts(norms.get_yticklabels()) == ["embed", "layers.0", "layers.1", "layers.2"]
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
    assert f"channel {first.channel}, {_canvas.shown(first.token)}" in texts(ax.texts)
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


def test_layers_without_any_error_are_drawn_at_the_edge(captures):
    ax = plots.plot_drift(compare_captures(captures[0], captures[0]))
    (equal,) = (line for line in ax.lines if line.get_label() == "equal")
    assert set(equal.get_xdata()) == {ax.get_xlim()[0]}


def test_errors_that_are_zero_or_infinite_can_be_drawn(tmp_path):
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
    assert _canvas.layer_labels(layers) == ([str(n) for n in range(400)], "model.layers")
    assert _canvas.layer_labels(["", "a.0"]) == (["<root>", "a.0"], "Layer")
    ax = Figure(figsize=(4, 4)).subplots()
    _canvas.heat_map(ax, np.zeros((400, 2)), _canvas.SHARES, "x")
    _canvas.layers_on_y(ax, layers)
    labels = texts(ax.get_yticklabels())
    assert 10 < len(labels) < 40
    assert labels[0] == "0"
    assert int(labels[1]) == ax.get_yticks()[1]
