"""A capture that fails while it begins leaves no hook, no thread and no lock."""

from __future__ import annotations

import threading

import pytest
import torch
from llm_instrumentation import ActivationReader, capture_activations
from llm_instrumentation.core.recording import recorder


@pytest.mark.parametrize(
    "part",
    [
        "check_place", "open_session", "CaptureState", "TensorSink", "remove_earlier", "next_step",
        "layouts_of", "CallLog", "AttachedHooks", "OutermostCalls", "Steps", "Gradients",
        "Streams", "CaptureCounters", "Ending", "hooks_in_c", "follow_crops", "run_eagerly",
    ],
)  # fmt: skip
def test_nothing_is_left(part, tmp_path, monkeypatch):
    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("made up")

    model, path = torch.nn.Sequential(torch.nn.Linear(2, 3)), tmp_path / "run.stream"
    with monkeypatch.context() as patch:
        patch.setattr(recorder, part, fails)
        with pytest.raises(RuntimeError, match="made up"):
            with capture_activations(model, path):
                pass
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    threads = [one for one in threading.enumerate() if one.name.startswith("strap-")]
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    with capture_activations(model, path):
        model(torch.ones(1, 2))
    with ActivationReader(path) as reader:
        assert len(reader) == 2
