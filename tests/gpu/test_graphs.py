"""CUDA graphs: what is recorded into one has no values, and a replay calls no hooks."""

from __future__ import annotations

import pytest
import torch
from llm_instrumentation import ActivationReader, capture_activations
from llm_instrumentation.errors import UnsupportedError
from plain_hooks import same

pytestmark = pytest.mark.gpu


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    return torch.nn.Sequential(*layers).to(device)


@pytest.fixture
def batch(device):
    return torch.ones(4, 64, device=device)


def record_graph(model, batch, mode="global"):
    """Records a call into a CUDA graph, after the warm-up calls that CUDA's libraries need."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        model(batch)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        model(batch)
    return graph


@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_outputs_in_a_cuda_graph_give_notes_and_warnings(mode, model, batch, path, quiet):
    """In the mode "global" calls of other threads count, such as those of the transfers."""
    with (
        torch.no_grad(),
        pytest.warns(RuntimeWarning, match="replays of the graph run no hooks") as caught,
        capture_activations(model, path, config=quiet),
    ):
        for _ in range(50):  # transfers are under way when the recording begins
            model(batch)
        graph = record_graph(model, batch, mode)
        graph.replay()
        torch.cuda.synchronize()
    assert len([w for w in caught if "CUDA graph" in str(w.message)]) == 4  # one for each layer
    with ActivationReader(path) as reader:
        assert len(reader) == 4 * 51  # the outputs of the calls before the graph
        assert [note.name for note in reader.missing] == ["0", "1", "2", ""]


def test_a_strict_capture_refuses_a_cuda_graph(model, batch, path, quiet):
    with (
        torch.no_grad(),
        pytest.raises(UnsupportedError, match="CUDA graph"),
        capture_activations(model, path, config=quiet.with_strict()),
    ):
        record_graph(model, batch)


def test_a_graph_of_another_model_is_recorded_meanwhile(model, batch, device, path, quiet):
    """The threads of a capture wait for the device. That ends no recording, and no capture."""
    other = torch.nn.Linear(64, 64).to(device)
    with torch.no_grad(), capture_activations(model, path, config=quiet):
        output = model(batch)
        for _ in range(50):
            model(batch)
        graph = record_graph(other, batch)
        graph.replay()
    with ActivationReader(path) as reader:
        assert len(reader[""]) == 51
        assert all(same(one.to_torch(), output.cpu()) for one in reader[""])


def test_replays_of_a_graph_that_was_recorded_before_call_no_hooks(model, batch, path, quiet):
    with torch.no_grad():
        graph = record_graph(model, batch)
        with pytest.warns(RuntimeWarning, match="no module ran"):
            with capture_activations(model, path, config=quiet):
                graph.replay()
                torch.cuda.synchronize()
    with ActivationReader(path) as reader:
        assert len(reader) == 0


@pytest.mark.filterwarnings("ignore:.*compiled")
@pytest.mark.parametrize("begins", ["before", "in the block", "after"])
def test_compiled_for_graphs(begins, model, batch, device, path, quiet):
    """The model runs eagerly during a capture, and as compiled before and after it."""
    how = {"mode": "reduce-overhead"} if device == "cuda" else {"backend": "eager"}
    with torch.no_grad():
        expected = model(batch).cpu()
        compiled = torch.compile(model, **how)
        for _ in range(3 if begins == "before" else 0):
            compiled(batch)
        with capture_activations(model, path, config=quiet):
            for _ in range(5):
                output = model(batch) if begins == "after" else compiled(batch)
        for _ in range(3):
            again = compiled(batch)
        torch.testing.assert_close(again.cpu(), expected, rtol=1e-4, atol=1e-4)
    assert same(output.cpu(), expected)
    with ActivationReader(path) as reader:
        assert len(reader) == 20
        assert all(same(one.to_torch(), expected) for one in reader[""])
