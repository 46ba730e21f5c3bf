"""Hooks leave nothing in a model, and tell of modules that change during a capture."""

from __future__ import annotations

import os
import threading
import warnings
from typing import Any

import pytest
import torch
from hooked_models import balanced, hooks_of
from llm_instrumentation import ActivationReader, InstrumentationConfig, capture_activations
from torch import Tensor, nn


def test_hooks_live_in_the_block_only(llama, ids, path):
    framework = balanced(llama)
    assert hooks_of(llama) == 0
    with torch.no_grad(), framework.capture_activations(path):
        assert hooks_of(llama) >= sum(1 for _ in llama.modules()) - 1  # ModuleList has no output
        before = llama(ids).logits
    assert hooks_of(llama) == 0
    with torch.no_grad():
        assert torch.equal(llama(ids).logits, before)


def test_hooks_of_others_stay(mlp, x, path):
    seen = []
    handle = mlp[0].register_forward_hook(lambda *_: seen.append("theirs"))
    with torch.no_grad(), capture_activations(mlp, path):
        mlp(x)
    mlp(x)
    assert seen == ["theirs", "theirs"]
    handle.remove()
    assert hooks_of(mlp) == 0


def test_no_thread_and_no_descriptor_is_left(mlp, x, tmp_path):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with capture_activations(mlp, tmp_path / "first.stream"):
        mlp(x)  # the library starts its own threads once
    threads, files = threading.active_count(), descriptors()
    for n in range(5):
        with capture_activations(mlp, tmp_path / f"{n}.stream"):
            mlp(x)
    assert threading.active_count() == threads
    assert descriptors() == files


def test_a_capture_warns_of_a_replaced_module(mlp, x, path, read):
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="has taken the place of '2' during"):
        with capture_activations(mlp, path):
            mlp(x)
            mlp[2] = nn.Linear(16, 3)
            mlp(x)
    assert [name for name, _ in read(path)] == ["0", "1", "2", "", "0", "1", ""]


class Wrapped(nn.Module):
    """Returns something else than the module that it wraps, as an adapter does."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 1


def wrap_in_the_dict(layers: nn.ModuleList) -> None:
    layers._modules["1"] = Wrapped(layers[1])


@pytest.mark.parametrize(
    "change",
    [
        wrap_in_the_dict,
        lambda layers: layers.__delitem__(0),
        lambda layers: layers.insert(0, nn.Linear(3, 3)),
        lambda layers: layers.pop(0),
        lambda layers: layers._modules.update({"0": layers[1], "1": layers[0]}),
    ],
    ids=["wrapped in the dict", "deleted", "inserted", "popped", "swapped in the dict"],
)
def test_a_list_that_changes_gives_no_packet_the_name_of_another_module(path, change):
    """PyTorch tells nobody of these changes."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    model, x = Layers(), torch.randn(2, 3)
    config = InstrumentationConfig.max().with_float32()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with capture_activations(model, path, config=config):
            model(x)
            change(model.layers)
            seen: dict[str, Tensor] = {}
            for name, module in model.named_modules():
                module.register_forward_hook(
                    lambda module, args, output, name=name: seen.update({name: output.clone()})
                )
            model(x)
    with ActivationReader(path) as reader:
        for name in reader.layers:
            for one in reader[name]:
                if one.step == 1:
                    assert torch.equal(one.to_torch(), seen[name]), name
        moved = {f"layers.{n}" for n in range(3)} - {
            name for name in reader.layers if len(reader[name]) == 2
        }
        assert moved and {note.name for note in reader.missing} == moved


@pytest.mark.parametrize("unwrapped", [False, True])
def test_a_module_that_is_wrapped_is_not_captured_under_its_name(mlp, x, path, read, unwrapped):
    """Not even if the wrapper is gone when the capture ends."""
    inner, model = mlp[2], nn.Sequential(mlp, nn.Linear(3, 3))
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="the place of '0.2' .* around it"):
        with capture_activations(model, path):
            model(x)
            mlp[2] = Wrapped(inner)
            model(x)
            if unwrapped:
                mlp[2] = inner
    names = [name for name, _ in read(path)]
    assert names == ["0.0", "0.1", "0.2", "0", "1", "", "0.0", "0.1", "0", "1", ""]
    with ActivationReader(path) as reader:
        (note,) = reader.missing
        assert (note.name, note.error.split(" during")[0]) == (
            "0.2", "another module has taken the place of '0.2'",
        )  # fmt: skip


def test_what_is_inside_a_wrapped_module_has_another_name_from_then_on(mlp, x, path, read):
    model = nn.Sequential(mlp, nn.Linear(3, 3))
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="the place of '0' during"):
        with capture_activations(model, path):
            model(x)
            model[0] = Wrapped(mlp)
            model(x)
    assert [name for name, _ in read(path)] == ["0.0", "0.1", "0.2", "0", "1", "", "1", ""]


def test_a_module_that_left_without_a_word_is_told_at_the_end(mlp, x, path):
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="'2' left the model during"):
        with capture_activations(mlp, path):
            mlp(x)
            del mlp._modules["2"]


def test_an_adapter_that_is_added_is_told(llama, ids, path):
    peft = pytest.importorskip("peft")

    def lora(target: str) -> Any:
        return peft.LoraConfig(r=4, target_modules=[target], task_type="CAUSAL_LM")

    model = peft.get_peft_model(llama, lora("q_proj"), adapter_name="one").eval()
    name = "base_model.model.model.layers.1.self_attn.k_proj"
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=f"the place of '{name}'"):
        with capture_activations(model, path):
            model(input_ids=ids)
            model.add_adapter("two", lora("k_proj"))
            model(input_ids=ids)
    with ActivationReader(path) as reader:
        assert [one.step for one in reader[name]] == [0]
        assert [one.step for one in reader[name.replace("k_proj", "v_proj")]] == [0, 1]


def test_a_warning_that_is_an_error_leaves_nothing_open(mlp, x, path, read):
    """If warnings are errors, the capture still ends whole, and the next one can begin."""
    with warnings.catch_warnings(), pytest.raises(RuntimeWarning, match="the place of '2'"):
        warnings.simplefilter("error", RuntimeWarning)
        with torch.no_grad(), capture_activations(mlp, path):
            mlp(x)
            mlp[2] = nn.Linear(16, 3)
    assert len(read(path)) == 4
    with torch.no_grad(), capture_activations(mlp, path):
        mlp(x)


def test_a_capture_warns_of_a_preset_beside_a_configuration(mlp, x, path):
    config = InstrumentationConfig.max_compression()
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="preset 'fast_capture' is taken"):
        with capture_activations(mlp, path, preset="fast_capture", config=config) as framework:
            mlp(x)
    assert framework.config == InstrumentationConfig.fast_capture()
