"""ActivationReader finds the activations of a capture by layer, step, token and call."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llm_instrumentation import ActivationReader, StrapError
from small_captures import capturing


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


def test_models_of_one_capture_are_told_apart(path):
    with capturing(path) as put:
        put("h", torch.tensor([1e6]), model="a")
        put("h", torch.tensor([2e6]), model="b")
    with ActivationReader(path) as reader:
        assert {a.model: a.to_torch().item() for a in reader["h"]} == {"a": 1e6, "b": 2e6}
