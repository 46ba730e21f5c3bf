"""What a notebook shows of captures, activations and counters."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from torch import nn


class Shown(HTMLParser):
    """The texts of a page. Each element that is opened must be closed, in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.bars: list[float] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attributes):
        self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        assert tag == "path"
        # A bar begins at its left side: M10 48.
        self.bars += [float(x) for x in re.findall(r"M([\d.]+) ", dict(attributes)["d"])]

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)


@pytest.fixture
def reader(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"a<b>&": nn.Linear(4, 8), "c": nn.Linear(8, 2)})
    model.forward = lambda x: model["c"](model["a<b>&"](x))
    config = InstrumentationConfig.balanced().with_float32()
    with torch.no_grad(), capture_activations(model, tmp_path / "run.stream", config=config):
        for _ in range(3):
            model(torch.randn(5, 4))
    with ActivationReader(tmp_path / "run.stream") as opened:
        yield opened


def test_a_capture_shows_its_layers(reader):
    texts = Shown(reader._repr_html_()).texts
    assert "run.stream': 9 activations, 3 layers" in texts[0]
    at = texts.index("a<b>&")
    assert texts[at : at + 6] == ["a<b>&", "3", "0 to 2", "[5, 8]", "float32", "float32"]


def test_a_selection_shows_its_own_layers(reader):
    texts = Shown(reader.select("c", steps=[1])._repr_html_()).texts
    assert texts[texts.index("c") + 1 :][:3] == ["1", "1", "[5, 2]"]
    assert "a<b>&" not in texts


def test_an_activation_shows_statistics_and_a_histogram_of_its_values(reader):
    (activation,) = reader.select("c", steps=[0])
    values = activation.to_numpy()
    shown = Shown(activation._repr_html_())
    for number in (values.min(), values.mean(dtype=np.float64), values.max()):
        assert f"{number:.4g}" in shown.texts
    counts, _ = np.histogram(values.astype(np.float64), 60)
    assert shown.bars == [5 * place for place in np.flatnonzero(counts)]


def test_values_that_cannot_be_read_are_said_so(reader):
    (activation,) = reader.select("c", steps=[0])
    reader.close()
    assert "The values cannot be read" in " ".join(Shown(activation._repr_html_()).texts)
    assert "closed" in Shown(reader._repr_html_()).texts[0]


def test_many_layers_are_cut_short(tmp_path):
    model = nn.Sequential(*(nn.Identity() for _ in range(40)))
    with capture_activations(model, tmp_path / "run.stream"):
        model(torch.ones(1))
    with ActivationReader(tmp_path / "run.stream") as reader:
        assert "and 11 more layers" in Shown(reader._repr_html_()).texts


def test_counters_that_are_not_zero_are_shown(tmp_path):
    model = nn.Linear(4, 4)
    with capture_activations(model, tmp_path / "run.stream") as capture:
        model(torch.ones(1, 4))
    texts = Shown(capture.stats()._repr_html_()).texts
    assert texts[texts.index("tensors") + 1] == "1"
    assert "dropped" not in texts
