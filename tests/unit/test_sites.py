"""Sites: how they are given, where they are in a model, and which elements they have."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import HeadLayout, Site, apply, attention_heads, intervene
from llm_instrumentation.interventions.running.spots import resolve
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.parts = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        return self.parts[0](self.second(self.first(x)))


def test_equal_sites_are_equal_whatever_they_are_given_as():
    mask = torch.tensor([[True, False], [True, True]])
    same = [
        Site("h.0", positions=1), Site("h.0", positions=[1]), Site("h.0", positions=range(1, 2)),
        Site("h.0", positions=torch.tensor(1)), Site.of("h.0", positions=(np.int64(1),)),
        Site.of(Site("h.0", positions=9), positions=[torch.tensor(1)]),
    ]  # fmt: skip
    assert len(set(same)) == 1
    assert Site("h.0!input") == Site("h.0", side="input") != Site("h.0")
    assert Site("h", positions=mask) == Site("h", positions=mask.numpy().tolist())
    assert Site("h", positions=slice(2)) in {Site("h", positions=slice(2))}
    site = Site("h.0", head=2, head_input="q", positions=[-1, 0], steps=slice(1, None))
    assert str(site) == "'h.0' head=2 q positions=(-1, 0) steps=slice(1, None, None)"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"layer": 3}, "layer = 3: give the name"),
        ({"side": "middle"}, "side = 'middle'"),
        ({"head": -1}, "head = -1 is negative"),
        ({"head": 1.5}, "head = 1.5 is no number"),
        ({"head": True}, "head = True is no number"),
        ({"head": 0, "side": "input"}, 'head = 0 with side="input"'),
        ({"head": 0, "head_input": "o"}, "head_input = 'o'"),
        ({"head_input": "q"}, "head_input = 'q' needs a head"),
        ({"positions": []}, "positions is empty"),
        ({"steps": "last"}, "steps = 'last' is no number"),
        ({"positions": [[1, 0]]}, "a mask has booleans"),
        ({"positions": [[False, False]]}, "one of its values is True"),
        ({"positions": [[True], [True, False]]}, "have one length"),
        ({"sequences": [[True]]}, "give numbers or a slice"),
        ({"steps": -1}, "steps = -1 is negative"),
        ({"calls": slice(-2, None)}, "has a negative number"),
    ],
)
def test_a_value_that_says_nothing_is_refused(where, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Site(**{"layer": "h.0", **where})


@pytest.mark.parametrize(
    ("wanted", "numbers"),
    [
        (None, [0, 1, 2, 3, 4]),
        (2, [2]),
        ([3, 0], [0, 3]),
        (slice(1, None, 2), [1, 3]),
        (slice(2), [0, 1]),
    ],
)
def test_steps_and_calls_are_chosen(wanted, numbers):
    assert [n for n in range(5) if Site("h", steps=wanted).includes(n, 0)] == numbers
    assert [n for n in range(5) if Site("h", calls=wanted).includes(7, n)] == numbers


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("frist", "the model has no layer 'frist': choose 'first'"),
        ("parts.0.weight", "the model has no layer 'parts.0.weight': choose 'parts.0'"),
        ("parts", "the model has no layer 'parts'"),  # a list of modules returns nothing
        ("", None),
        ("second[1]['key']", None),
    ],
)
def test_unknown_layers_are_refused_with_similar_names(layer, message):
    if message is None:
        assert resolve(Block(), [Site(layer)])[0].captured("") == layer.partition("[")[0]
        return
    with pytest.raises(InvalidArgumentError, match=re.escape(message)):
        resolve(Block(), [Site(layer)])


def test_a_shared_module_has_the_name_that_captures_give_it():
    model = Block()
    model.third = model.first
    (spot,) = resolve(model, [Site("third", side="input")])
    assert spot.captured("['x']") == "first['x']!input"


def test_torchscript_is_refused():
    scripted = torch.jit.trace(nn.Linear(4, 4), torch.zeros(1, 4))
    with pytest.raises(UnsupportedError, match="TorchScript"):
        resolve(nn.Sequential(scripted), [Site("0")])


def test_heads_of_unknown_modules_are_refused():
    with pytest.raises(InvalidArgumentError, match="say where they are with register_heads"):
        resolve(Block(), [Site("first", head=0)])


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"q": "a", "k": "b", "v": "a", "fused": "parts"}, "needs one module for q, k and v"),
        (
            {"q": "a", "k": "a", "v": "a", "fused": "heads", "key_value_heads": "n"},
            "shared keys and values",
        ),
    ],
)
def test_layouts_that_contradict_themselves_are_refused(layout, message):
    with pytest.raises(InvalidArgumentError, match=message):
        HeadLayout("out", **layout)


def test_a_layout_that_its_module_does_not_have_is_named(monkeypatch):
    from llm_instrumentation.interventions import heads

    monkeypatch.setitem(heads._LAYOUTS, "Block", HeadLayout("out", "first", "first", "first"))
    with pytest.raises(UnsupportedError, match="'' \\(Block\\) is not as its layout"):
        attention_heads(Block())


# ---- elements -------------------------------------------------------------------------------

X = torch.arange(3 * 5 * 4, dtype=torch.float32).view(3, 5, 4)


def indices(length: int) -> st.SearchStrategy:
    return st.one_of(
        st.none(),
        st.slices(length).filter(lambda chosen: len(range(length)[chosen])),
        st.lists(st.integers(-length, length - 1), min_size=1),
    )


def places(wanted, length: int) -> list[int]:
    if wanted is None:
        return list(range(length))
    if isinstance(wanted, slice):
        return sorted(range(length)[wanted])
    return sorted({range(length)[place] for place in wanted})


def negated(**where) -> tuple[torch.Tensor, torch.Tensor]:
    """X with the site's elements negated, and these elements."""
    seen = []

    def negative(values):
        seen.append(values)
        return -values

    model = nn.Identity()
    with intervene(model, apply("", negative, **where)):
        return model(X), seen[0]


@given(sequences=indices(3), positions=indices(5))
def test_the_elements_are_those_of_numpy(sequences, positions):
    changed, part = negated(sequences=sequences, positions=positions)
    chosen = np.ix_(places(sequences, 3), places(positions, 5))
    expected = X.numpy().copy()
    expected[chosen] *= -1
    assert np.array_equal(part.numpy(), X.numpy()[chosen])
    assert np.array_equal(changed.numpy(), expected)


@given(st.lists(st.booleans(), min_size=15, max_size=15).filter(any), indices(3))
def test_a_mask_chooses_tokens_of_each_sequence(flags, sequences):
    mask = np.array(flags).reshape(3, 5)
    kept = mask & np.isin(np.arange(3), places(sequences, 3))[:, None]
    if not kept.any():
        with pytest.raises(InvalidArgumentError, match="no token of these sequences"):
            negated(positions=torch.tensor(mask), sequences=sequences)
        return
    changed, part = negated(positions=torch.tensor(mask), sequences=sequences)
    assert np.array_equal(part.numpy(), X.numpy()[kept])
    assert np.array_equal(changed.numpy(), np.where(kept[..., None], -X.numpy(), X.numpy()))


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"positions": 5}, "'' positions=5: positions = 5, and this call has 5: use steps"),
        ({"positions": [0, -6]}, "positions = -6, and this call has 5"),
        ({"positions": slice(7, 9)}, "has none of the 5 of this call"),
        ({"sequences": 3}, "sequences = 3, and this call has 3"),
        ({"positions": [[True] * 4] * 3}, r"the mask has the shape \[3, 4\], and this call has"),
    ],
)
def test_places_that_a_call_does_not_have_are_refused(where, message):
    with pytest.raises(InvalidArgumentError, match=message):
        negated(**where)


@pytest.mark.parametrize("strides", [(20, 4, 1), (1, 3, 15), (40, 8, 2)])
def test_the_layout_in_memory_stays(strides):
    model = nn.Identity()
    x = torch.empty_strided((3, 5, 4), strides).copy_(X)
    with intervene(
        model, apply("", lambda values: values.clone(memory_format=torch.contiguous_format) + 1)
    ):
        assert model(x).stride() == strides
    with intervene(model, apply("", lambda values: values + 1, positions=2)):
        assert model(x).stride() == strides
    with intervene(model, apply("", lambda values: values + 1)):  # rows that share memory
        assert torch.equal(model(X[:1].expand(3, 5, 4)), X[:1].expand(3, 5, 4) + 1)
