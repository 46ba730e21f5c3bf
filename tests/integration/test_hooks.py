"""Hooks capture the outputs of modules in every mode of running, and leave no trace."""

from __future__ import annotations

import contextlib
import copy
import os
import re
import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    HookGranularity,
    InstrumentationConfig,
    InstrumentationFramework,
    capture_activations,
)
from llm_instrumentation.core.hooks import HookConfig, LayerSelectionError, OptimizedHookManager
from llm_instrumentation.core.sampling import sample_positions
from llm_instrumentation.errors import CaptureError, UnsupportedError
from torch import Tensor, nn
from transformers_cache import CACHE_NAME


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    )


def balanced(*models: nn.Module, **changes: object) -> InstrumentationFramework:
    config = InstrumentationConfig.balanced()
    for name, value in changes.items():
        setattr(config, name, value)
    framework = InstrumentationFramework(config)
    for model in models:
        framework.instrument_model(model)
    return framework


@pytest.fixture
def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(inplace=True), nn.Linear(16, 3))


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(2))


# ---- how the model runs -----------------------------------------------------------


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, torch.enable_grad, contextlib.nullcontext]
)
def test_every_gradient_mode(mode, llama, ids, path, watching, assert_captured):
    """A capture works in every gradient mode, and does not change the mode."""
    with mode(), watching(llama) as seen, capture_activations(llama, path):
        output = llama(ids).logits
    assert_captured(path, seen)
    assert output.requires_grad == (mode in (torch.enable_grad, contextlib.nullcontext))


def test_training_is_not_disturbed(build, ids, path, watching, assert_captured):
    def losses_and_gradients(model: nn.Module) -> tuple[list[float], list[Tensor]]:
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [parameter.grad for parameter in model.parameters()]

    alone = losses_and_gradients(build("llama").train())
    model = build("llama").train()
    with watching(model) as seen, capture_activations(model, path) as framework:
        captured = losses_and_gradients(model)
    assert captured[0] == alone[0]
    assert all(map(torch.equal, captured[1], alone[1]))
    assert_captured(path, seen)
    assert framework.stats().steps == 3


def test_a_value_is_captured_before_the_next_module_changes_it_in_place(mlp, x, path, read):
    with torch.no_grad():
        linear = mlp[0](x)
        with capture_activations(mlp, path):
            mlp(x)
    values = dict(read(path))
    assert torch.equal(values["0"], linear.half())
    assert torch.equal(values["1"], linear.relu().half())
    assert (values["0"] < 0).any()


def test_a_caller_may_change_the_output_at_once(mlp, x, path, read):
    with torch.no_grad():
        expected = mlp(x)
        with capture_activations(mlp, path):
            for _ in range(200):
                mlp(x).fill_(7)
    values = [value for name, value in read(path) if name == ""]
    assert len(values) == 200
    assert all(torch.equal(value, expected.half()) for value in values)


def test_outputs_without_contiguous_memory(path, watching, assert_captured):
    """Views, transposed, strided and conjugated outputs are captured bit for bit."""

    class Views(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return (
                x.T, x[:, ::2], x[:, None].expand(-1, 3, -1), x.permute(2, 0, 1) if x.ndim > 2
                else x.flip(0), x[2:3, 1], x.as_strided((3, 2), (1, 2)), x.diagonal(),
                x.unfold(1, 3, 1), x[0, 0], x[:0], x.T.bfloat16(), x.T.long(), x.T > 0,
                torch.complex(x, -x).T.conj(), torch.view_as_complex(x.reshape(-1, 2)).conj().imag,
            )  # fmt: skip

    model = Views()
    with watching(model) as seen, capture_activations(model, path, preset="max"):
        model(torch.randn(6, 8))
    assert_captured(path, seen)
    assert len(seen) == 15


def test_a_layer_whose_output_changes(path, watching, assert_captured):
    """A hook keeps facts of an output for the next call, and checks that they still fit."""
    x = torch.randn(4, 6)
    z = torch.complex(x, -x)
    outputs = [
        x, x, x.reshape(6, 4), x.T, x.half(), x.long(), x, (x, x.T), x.to_sparse().to_dense(), z,
        z.conj(), z.conj().imag, torch._neg_view(x), nn.Parameter(x), x[:0], x.sum(), x,
    ]  # fmt: skip
    model = nn.Sequential(nn.Identity())
    with torch.no_grad(), watching(model) as seen, capture_activations(model, path) as framework:
        for output in outputs:
            model(output)
    assert_captured(path, [(name, tensor.resolve_neg()) for name, tensor in seen])
    assert framework.stats().failed == 0
    with ActivationReader(path) as reader:
        assert [a.step for a in reader["0"]] == list(range(len(outputs)))


@pytest.mark.parametrize("preset", ["fast_capture", "balanced", "max"])
def test_empty_tensors_and_scalars(preset, path, read):
    """Empty tensors and scalars are captured with their shapes."""

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x[:0], x.sum(), torch.empty(0, 3, 2, dtype=torch.int32)

    model = Odd()
    with capture_activations(model, path, preset=preset):
        model(torch.ones(4, 6))
    assert [(name, tuple(value.shape)) for name, value in read(path)] == [
        ("", (0, 6)),
        ("[1]", ()),
        ("[2]", (0, 3, 2)),
    ]


def test_an_exception_of_the_model_comes_through(path, read):
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, x: Tensor, fail: bool) -> Tensor:
            x = self.first(x)
            if fail:
                raise KeyError("inside the model")
            return x

    model, x = Breaks(), torch.randn(4, 6)
    with torch.no_grad(), capture_activations(model, path) as framework:
        with pytest.raises(KeyError, match="inside the model"):
            model(x, fail=True)
        model(x, fail=False)  # the next call is a new step
    assert framework.stats().steps == 2
    with ActivationReader(path) as reader:
        assert [(a.name, a.step) for a in reader] == [("first", 0), ("first", 1), ("", 1)]


def test_packets_from_before_an_exception_of_the_block_are_kept(mlp, x, path, read):
    with pytest.raises(KeyError, match="mine"), capture_activations(mlp, path):
        mlp(x)
        raise KeyError("mine")
    assert [name for name, _ in read(path)] == ["0", "1", "2", ""]
    assert hooks_of(mlp) == 0


# ---- steps and calls --------------------------------------------------------------


def test_each_outermost_call_is_a_step(mlp, x, path):
    with torch.no_grad(), capture_activations(mlp, path):
        for _ in range(3):
            mlp(x)
    with ActivationReader(path) as reader:
        assert reader.steps == (0, 1, 2)
        assert reader.tokens == ()  # without a tracker there are no tokens
        assert [a.step for a in reader["0"]] == [0, 1, 2]
        assert [a.call for a in reader["0"]] == [0, 0, 0]


def test_shared_modules_count_their_calls(path, watching, assert_captured):
    torch.manual_seed(0)
    shared = nn.Linear(6, 6)
    model = nn.Sequential(shared, nn.ReLU(), shared, nn.ReLU(), shared)
    with torch.no_grad(), watching(model) as seen, capture_activations(model, path):
        model(torch.randn(4, 6))
        model(torch.randn(4, 6))
    assert_captured(path, seen)  # a shared module is captured under the first of its names
    with ActivationReader(path) as reader:
        assert [(a.step, a.call) for a in reader["0"]] == [
            (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
        ]  # fmt: skip
        assert torch.equal(
            reader["0"].at(step=1, call=2).to_torch(), reader[""].at(step=1).to_torch()
        )


def test_a_model_that_calls_itself_is_one_step(path):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor, depth: int = 3) -> Tensor:
            return self.layer(x) if depth == 0 else self(x, depth - 1) + 1

    model = Twice()
    with torch.no_grad(), capture_activations(model, path) as framework:
        model(torch.randn(2, 6))
    assert framework.stats().steps == 1
    with ActivationReader(path) as reader:
        assert [(a.name, a.step, a.call) for a in reader] == [
            ("layer", 0, 0), ("", 0, 0), ("", 0, 1), ("", 0, 2), ("", 0, 3),
        ]  # fmt: skip


# ---- several at once --------------------------------------------------------------


def test_several_models_in_one_capture(mlp, x, path, watching, assert_captured):
    """Models of one class get different names. Each call of a model is a step."""
    other = copy.deepcopy(mlp)
    gate = nn.Linear(6, 2)
    framework = balanced(mlp, other, gate)
    framework.instrument_model(mlp)  # the model is registered already, so this changes nothing
    with torch.no_grad(), framework.capture_activations(path):
        gate(x)
        mlp(x)
        other(x + 1)
    with ActivationReader(path) as reader:
        assert [(a.model, a.name, a.step) for a in reader] == [
            ("linear", "", 0),
            *[("sequential", name, 1) for name in ("0", "1", "2", "")],
            *[("sequential#2", name, 2) for name in ("0", "1", "2", "")],
        ]
        first, second = [a.to_torch() for a in reader["2"]]
    with torch.no_grad():
        assert torch.equal(first, mlp(x).half())
        assert torch.equal(second, other(x + 1).half())


def test_captures_may_be_nested(mlp, x, tmp_path, read):
    outer, inner = tmp_path / "outer.stream", tmp_path / "inner.stream"
    with torch.no_grad(), capture_activations(mlp, outer):
        mlp(x)
        with capture_activations(mlp, inner, preset="fast_capture"):
            mlp(x + 1)
        assert hooks_of(mlp) > 0
        mlp(x + 2)
    assert hooks_of(mlp) == 0
    assert len(read(outer)) == 12
    assert len(read(inner)) == 4
    with ActivationReader(outer) as a, ActivationReader(inner) as b:
        assert b.steps == (0,)
        for layer in b.layers:
            assert torch.equal(a[layer].at(step=1).to_torch(), b[layer][0].to_torch())


def test_a_framework_may_capture_again(mlp, x, tmp_path, read):
    framework = balanced(mlp)
    for n in (1, 2):
        with torch.no_grad(), framework.capture_activations(tmp_path / f"{n}.stream"):
            for _ in range(n):
                mlp(x)
        assert framework.stats().steps == n
        assert framework.stats().path == str(tmp_path / f"{n}.stream")
        assert len(read(tmp_path / f"{n}.stream")) == 4 * n


def test_a_framework_may_capture_twice_at_once(mlp, x, tmp_path, read):
    framework = balanced(mlp)
    with torch.no_grad(), framework.capture_activations(tmp_path / "a.stream"):
        with framework.capture_activations(tmp_path / "b.stream"):
            mlp(x)
        mlp(x)
        assert framework.stats().path == str(tmp_path / "a.stream")
    assert len(read(tmp_path / "a.stream")) == 8
    assert len(read(tmp_path / "b.stream")) == 4


def test_a_capture_replaces_an_older_one(mlp, x, path, read):
    for n in (3, 1):
        with torch.no_grad(), capture_activations(mlp, path):
            for _ in range(n):
                mlp(x)
    assert len(read(path)) == 4


def test_threads_have_steps_of_their_own(mlp, path):
    """If several threads call one model, each call is a step with its own packets."""
    calls, errors = 40, []
    inputs = [torch.full((4, 6), float(i)) for i in range(2 * calls)]

    def work(mine: list[Tensor]) -> None:
        try:
            with torch.no_grad():
                for x in mine:
                    mlp(x)
                    time.sleep(0)
        except BaseException as error:
            errors.append(error)

    with capture_activations(mlp, path) as framework:
        threads = [threading.Thread(target=work, args=(inputs[i::2],)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []
    assert framework.stats().steps == 2 * calls
    with torch.no_grad():
        expected = sorted(mlp(x).half().flatten().tolist() for x in inputs)
    with ActivationReader(path) as reader:
        assert reader.steps == tuple(range(2 * calls))
        assert len({a.thread for a in reader}) == 2
        results = []
        for step in reader.steps:
            view = reader.select(steps=step)
            assert [(a.name, a.call) for a in view] == [("0", 0), ("1", 0), ("2", 0), ("", 0)]
            assert len({a.thread for a in view}) == 1
            results.append(view[3].to_torch().flatten().tolist())
    assert sorted(results) == expected


# ---- no trace ---------------------------------------------------------------------


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


# ---- what is selected -------------------------------------------------------------


def layers_of(model: nn.Module, run, path, config: InstrumentationConfig) -> list[str]:
    with torch.no_grad(), capture_activations(model, path, config=config):
        run()
    with ActivationReader(path) as reader:
        return list(reader.layers)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("model.layers.*.mlp", (), ["model.layers.0.mlp", "model.layers.1.mlp"]),
        (re.compile(r"\.0\..*norm"), (), [
            "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm",
        ]),
        ((nn.Embedding, "lm_head"), (), ["model.embed_tokens", "lm_head"]),
        ("model.layers.*_proj", re.compile("self_attn|gate|up"), [
            "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj",
        ]),
    ],
)  # fmt: skip
def test_layers_are_included_and_excluded(include, exclude, expected, llama, ids, path):
    config = InstrumentationConfig.balanced().with_layers(include, exclude)
    assert layers_of(llama, lambda: llama(ids), path, config) == expected


@pytest.mark.parametrize(
    ("granularity", "block"),
    [(HookGranularity.ATTENTION_ONLY, "self_attn"), (HookGranularity.MLP_ONLY, "mlp")],
)
def test_granularities_take_blocks_with_all_inside(granularity, block, llama, ids, path, watching):
    config = InstrumentationConfig.balanced().with_granularity(granularity)
    with watching(llama) as seen:
        layers = layers_of(llama, lambda: llama(ids), path, config)
    assert layers == list(dict.fromkeys(n for n, _ in seen if f".{block}" in n))
    assert len(layers) >= 8


def test_samples_are_at_their_positions(llama, ids, path, watching):
    config = InstrumentationConfig.balanced().with_sampling(0.1, seed=7)
    with torch.no_grad(), watching(llama) as seen:
        with capture_activations(llama, path, config=config) as framework:
            llama(ids)
    with ActivationReader(path) as reader:
        assert len(reader) == len(seen)
        for activation, (name, tensor) in zip(reader, seen, strict=True):
            positions = sample_positions(tensor.numel(), 0.1, 7)
            assert activation.name == name
            assert activation.source_shape == tensor.shape
            assert np.array_equal(activation.positions, positions)
            sample = tensor.flatten()[torch.tensor(positions)].half()
            assert torch.equal(activation.to_torch(), sample)
            dense = activation.to_dense()
            assert dense.shape == tensor.shape
            assert int((~dense.isnan()).sum()) == len(positions)
    full = sum(tensor.nbytes for _, tensor in seen)
    assert framework.stats().raw_bytes == pytest.approx(full * 0.1, rel=0.01)


def test_a_sample_is_the_same_in_every_run(llama, ids, tmp_path, read):
    config = InstrumentationConfig.balanced().with_sampling(0.05, seed=1)
    runs = []
    for n in range(2):
        with torch.no_grad(), capture_activations(llama, tmp_path / f"{n}.stream", config=config):
            llama(ids)
        runs.append(read(tmp_path / f"{n}.stream"))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(*runs, strict=True))


def test_key_value_caches_on_request(llama, ids, tmp_path, read):
    """Caches are captured only with `with_kv_cache`."""
    without, with_cache = tmp_path / "without.stream", tmp_path / "with.stream"
    with torch.no_grad(), capture_activations(llama, without):
        llama(ids, use_cache=True)
        llama(ids, use_cache=True, return_dict=False)
    config = InstrumentationConfig.balanced().with_kv_cache()
    with torch.no_grad(), capture_activations(llama, with_cache, config=config):
        cache = llama(ids, use_cache=True)[CACHE_NAME]
    names = {name for name, _ in read(without)}
    assert "['logits']" in names and "" in names  # from a mapping and from a tuple
    assert [name for name in names if "keys" in name or "values" in name] == []
    values = dict(read(with_cache))
    if isinstance(cache, tuple):  # older transformers: a tuple of each layer's keys and values
        wanted = {f"[{i}][{at}]": cache[i][at] for i in range(len(cache)) for at in (0, 1)}
    else:
        wanted = {
            f"[{i}].{at}": getattr(layer, at)
            for i, layer in enumerate(cache.layers)
            for at in ("keys", "values")
        }
    assert len(wanted) == 4
    for at, expected in wanted.items():
        assert torch.equal(values[f"['{CACHE_NAME}']{at}"], expected.half())


# ---- what cannot be captured ------------------------------------------------------


class Returns(nn.Module):
    """Returns a tensor of its layer, and the object that it was made with."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.output = output

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        return self.layer(x), self.output


class Wrapper(Tensor):
    """A tensor that holds another one and has no memory of its own."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        held = (arg.held if isinstance(arg, Wrapper) else arg for arg in args)
        return cls(function(*held, **(kwargs or {})))


UNSUPPORTED = {
    "meta": lambda: torch.empty(3, 4, device="meta"),
    "wrapper": lambda: Wrapper(torch.ones(3)),
}


@pytest.mark.parametrize("rate", [None, 0.5])
@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_tensor_that_cannot_be_stored_is_noted(kind, rate, path):
    model, x = Returns(UNSUPPORTED[kind]()), torch.randn(4, 6)
    config = InstrumentationConfig.balanced()
    if rate is not None:
        config.with_sampling(rate)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="output of layer '' is not") as told:
        with capture_activations(model, path, config=config) as framework:
            for _ in range(3):
                output = model(x)
    assert output[1] is model.output
    assert len(told) == 1  # one warning for each layer and reason, not for each step
    stats = framework.stats()
    assert (stats.failed, stats.tensors) == (3, 6)
    with ActivationReader(path) as reader:
        assert [(a.name, a.step) for a in reader.missing] == [("[1]", n) for n in range(3)]
        assert all(a.error for a in reader.missing)
        assert [a.name for a in reader] == ["layer", ""] * 3
        if rate is None:
            assert torch.equal(reader[""][2].to_torch(), output[0].half())


def test_transformed_calls_are_noted(mlp, path, read):
    """Inside torch.func tensors wrap other tensors and have no values to capture."""
    model = nn.Sequential(mlp[0], nn.Tanh())
    with pytest.warns(RuntimeWarning, match=r"wraps others .* as in torch\.func"):
        with capture_activations(model, path) as framework:
            model(torch.ones(2, 6))
            torch.func.vmap(model)(torch.ones(5, 2, 6))
    assert framework.stats().failed == 3
    assert [name for name, _ in read(path)] == ["0", "1", ""]


def test_a_dense_tensor_between_others(path, read):
    """A layer may return dense tensors and tensors without values in turn."""
    model, x = nn.Sequential(nn.Identity()), torch.eye(3)
    with pytest.warns(RuntimeWarning, match="no values to capture"):
        with capture_activations(model, path) as framework:
            for output in (x, x.to("meta"), x, x.to("meta"), x):
                model(output)
    assert framework.stats().failed == 4
    assert [name for name, _ in read(path)] == ["0", ""] * 3
    assert all(torch.equal(value, x.half()) for _, value in read(path))


def test_a_name_that_is_too_long_costs_only_that_output(path, read):
    """A packet's name has at most 65,535 bytes. Other outputs are captured."""

    class Keys(nn.Module):
        def forward(self, x: Tensor, key: str) -> dict[str, Tensor]:
            return {"before": x, key: x + 1, "behind": x + 2}

    model, x = Keys(), torch.eye(3)
    keys = ["short", "k" * 70_000, "k" * 70_000, "l" * 70_000, "short"]
    with pytest.warns(RuntimeWarning, match=r"output of layer '' is not .* at most 65535") as told:
        with capture_activations(model, path) as framework:
            for key in keys:
                model(x, key)
    assert len(told) == 1  # one warning for all names of the layer
    stats = framework.stats()
    assert (stats.failed, stats.tensors) == (3, 12)
    with ActivationReader(path) as reader:
        assert [a.step for a in reader.missing] == [1, 2, 3]
        for missing in reader.missing:
            letter = "l" if missing.step == 3 else "k"
            assert missing.path.startswith(f"['{letter * 100}") and len(missing.path) < 1000
            assert "at most 65535" in missing.error
        for name in ("['before']", "['behind']"):
            assert [a.step for a in reader[name]] == [0, 1, 2, 3, 4]
        assert [a.step for a in reader["['short']"]] == [0, 4]


def test_names_that_are_never_the_same_do_not_end_the_capture(path):
    """The library keeps the names of all layers, up to 64 MiB.

    Beyond that, outputs with new names are counted as failed. Other outputs are captured.
    """

    class Keys(nn.Module):
        def forward(self, x: Tensor, key: str) -> dict[str, Tensor]:
            return {"before": x, key: x + 1, "behind": x + 2}

    model, x, calls = Keys(), torch.eye(3), 600
    with pytest.warns(RuntimeWarning, match="names made anew for each tensor") as told:
        with capture_activations(model, path) as framework:
            for i in range(calls):
                model(x, f"{i}" + "k" * 60_000)
    stats = framework.stats()
    assert len(told) == 1 and 0 < stats.failed < 100
    assert stats.tensors == 3 * calls - stats.failed
    with ActivationReader(path) as reader:
        assert len(reader["['behind']"]) == calls
        assert len(reader.missing) == stats.failed


def test_a_name_that_cannot_be_written_costs_only_that_output(path):
    class Odd(str):
        def __repr__(self) -> str:
            return "\ud800\0"

    model = Returns({Odd("k"): torch.ones(3), "behind": torch.zeros(3)})
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="is not captured: .*not UTF-8"):
        with capture_activations(model, path):
            model(torch.randn(4, 6))
    with ActivationReader(path) as reader:
        assert [a.name for a in reader] == ["layer", "", "[1]['behind']"]
        assert [a.path for a in reader.missing] == ["[1][\\ud800\\0]"]


def test_an_output_that_cannot_be_walked_costs_only_that_output(path, read):
    class Broken(dict):
        def items(self) -> object:
            raise KeyError("mine")

    model = Returns(Broken())
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=r"is not captured: .*KeyError\('mine"):
        with capture_activations(model, path) as framework:
            model(torch.randn(4, 6))
            model(torch.randn(4, 6))
    assert framework.stats().failed == 2
    assert [name for name, _ in read(path)] == ["layer", "layer"]


def test_a_layer_is_warned_of_once_for_each_kind_of_error(path):
    """Errors with different texts give one warning. The index has each text."""

    class Broken(dict):
        def items(self) -> object:
            count.append(1)
            if len(count) % 2:
                raise KeyError(f"the {len(count)}th")
            raise ValueError(f"the {len(count)}th")

    class Named(dict):
        def items(self) -> object:
            count.append(1)
            return [("k" * 70_000 + str(len(count)), torch.ones(3))]

    for output, kinds in ((Broken(), 2), (Named(), 1), ({"a": torch.eye(3).to("meta")}, 1)):
        model, count = Returns(output), []
        with torch.no_grad(), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with capture_activations(model, path):
                for _ in range(10):
                    model(torch.randn(4, 6))
        assert len(told) == kinds
        with ActivationReader(path) as reader:
            assert len(reader.missing) == 10


def test_a_tensor_that_cannot_be_stored_does_not_hide_those_behind_it(path, read):
    class Three(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, x.to("meta"), x + 1

    model, x = Three(), torch.eye(3)
    with pytest.warns(RuntimeWarning, match="no values to capture"):
        with capture_activations(model, path) as framework:
            model(x)
    assert framework.stats().failed == 1
    assert [name for name, _ in read(path)] == ["", "[2]"]
    assert torch.equal(dict(read(path))["[2]"], (x + 1).half())


def test_strict_captures_raise_inside_the_model(path, read):
    """With `with_strict` an output that cannot be captured raises out of the model's call."""
    model = Returns(torch.eye(3).to("meta"))
    config = InstrumentationConfig.balanced().with_strict()
    with torch.no_grad(), pytest.raises(UnsupportedError, match="meta"):
        with capture_activations(model, path, config=config):
            model(torch.randn(4, 6))
    assert [name for name, _ in read(path)] == ["layer", ""]
    assert hooks_of(model) == 0


def test_objects_that_hold_tensors_are_reported(path, read):
    model = Returns(SimpleNamespace(hidden=torch.ones(3)))
    with torch.no_grad(), pytest.warns(RuntimeWarning, match=r"not captured: types\.SimpleName"):
        with capture_activations(model, path):
            model(torch.randn(4, 6))
    assert [name for name, _ in read(path)] == ["layer", ""]


def test_objects_without_tensors_are_passed_over(path, read):
    model = Returns({"name": "x", "n": 3, "none": None, "config": SimpleNamespace(a=1)})
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with capture_activations(model, path):
            model(torch.randn(4, 6))
    assert [name for name, _ in read(path)] == ["layer", ""]


def test_a_capture_of_nothing_is_an_error(path):
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> None:
            return None

    model = Silent()
    with pytest.raises(CaptureError, match=r"1 forward calls, but no output was captured to .*run"):
        with capture_activations(model, path):
            model(torch.ones(1))
    assert hooks_of(model) == 0


class Refusing(nn.Module):
    """Raises for None before it calls its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        if x is None:
            raise ValueError("nothing to look at")
        return self.layer(x)


def test_a_call_that_raised_does_not_count_as_hiding_modules(path):
    """The model raises before any module runs. This only gives a warning."""
    with pytest.warns(RuntimeWarning, match="no module ran in the block"):
        with capture_activations(Refusing(), path) as framework:
            with pytest.raises(ValueError, match="nothing to look at"):
                framework._models[0](None)
    assert framework.stats().steps == 1


def test_hidden_modules_are_an_error_also_while_an_exception_is_handled(path):
    """The model's call succeeds without its modules, within an except block."""
    model = Refusing()
    model.forward = lambda x: None
    config = InstrumentationConfig.balanced().with_layers("layer")
    with pytest.raises(CaptureError, match="1 forward calls, but no output was captured"):
        with capture_activations(model, path, config=config):
            try:
                raise ValueError
            except ValueError:
                model(torch.ones(2, 6))


def test_a_block_without_calls_gives_an_empty_capture(mlp, path, read):
    with capture_activations(mlp, path) as framework:
        pass
    assert framework.stats().steps == 0
    assert read(path) == []


def test_a_model_without_modules_to_capture_is_refused(mlp, path):
    """The error comes before the file at the path is touched."""
    path.write_bytes(b"precious")
    config = InstrumentationConfig.balanced().with_layers("transformer.*")
    with pytest.raises(LayerSelectionError, match=r"no module of Sequential matches .*it has ''"):
        with capture_activations(mlp, path, config=config):
            pass
    with pytest.raises(ValueError, match="no module of ModuleList"):
        with capture_activations(nn.ModuleList(), path):
            pass
    assert path.read_bytes() == b"precious"
    assert hooks_of(mlp) == 0
    with pytest.raises(TypeError, match="model must be a torch"):
        balanced("llama")


def test_dropping_never_waits_and_counts(path, read):
    config = InstrumentationConfig.fast_capture().with_drop_when_full().with_workers(1)
    config.with_memory_limit(0.004)
    model, x = nn.Identity(), torch.randn(256, 1024)  # each packet has 0.5 MB
    with capture_activations(model, path, config=config) as framework:
        for _ in range(400):
            model(x)
    stats = framework.stats()
    assert stats.tensors + stats.dropped == 400
    assert stats.dropped > 0
    assert stats.dropped_bytes == stats.dropped * x.nbytes
    assert stats.stalls == 0
    assert stats.memory_peak <= stats.memory_limit
    values = read(path)
    assert len(values) == stats.tensors
    assert all(torch.equal(value, x.half()) for _, value in values)
    with ActivationReader(path) as reader:
        assert len(reader.missing) == stats.dropped
        assert {a.step for a in reader} | {a.step for a in reader.missing} == set(range(400))


def test_blocking_loses_nothing_in_little_memory(path, read):
    config = InstrumentationConfig.fast_capture().with_workers(1).with_memory_limit(0.004)
    config.with_throughput(1e-9)  # no warning of a slow disk
    model, x = nn.Identity(), torch.randn(256, 1024)
    with capture_activations(model, path, config=config) as framework:
        for _ in range(100):
            model(x)
    stats = framework.stats()
    assert (stats.tensors, stats.dropped) == (100, 0)
    assert stats.memory_peak <= stats.memory_limit
    assert all(torch.equal(value, x.half()) for _, value in read(path))


def test_a_hook_manager_feeds_a_processor_of_ones_own(mlp, x):
    class Means:
        def __init__(self) -> None:
            self.seen: list[tuple[str, bool, bool, Tensor]] = []

        def process(self, tensor: Tensor, metadata: dict) -> None:
            self.seen.append(
                (metadata["layer_name"], metadata["sync"], metadata["compress"], tensor.mean())
            )

    processor = Means()
    manager = OptimizedHookManager(processor)
    manager.attach_hooks(mlp, HookConfig(HookGranularity.FULL_TENSOR, target_layers=["0", "2"]))
    output = mlp(x)
    manager.detach_hooks()
    mlp(x)
    assert [(name, sync, compress) for name, sync, compress, _ in processor.seen] == [
        ("0", False, True),
        ("2", False, True),
    ]
    assert not processor.seen[1][3].requires_grad
    assert torch.equal(processor.seen[1][3], output.mean())
    assert hooks_of(mlp) == 0
