"""Blocks of interventions follow each other, leave nothing behind, and refuse what does not fit."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from intervened import LAYER, MLP, captured, hooks, output_of, result
from llm_instrumentation.errors import InvalidArgumentError, UnsupportedError
from llm_instrumentation.interventions import (
    UnusedEditError,
    add,
    apply,
    freeze,
    intervene,
    mean,
    noise,
    replace,
    resample,
    zero,
)
from torch import Tensor, nn
from transformers_cache import CACHE_NAME

# ---- modules that change -------------------------------------------------------------------


class _Wrapper(nn.Module):
    """As an adapter has it: the module, and something beside it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.base(*args, **kwargs)
        return output + 1 if isinstance(output, Tensor) else output


def _wrap(parent: nn.Module, child: str) -> None:
    setattr(parent, child, _Wrapper(parent.get_submodule(child)))


REWIRINGS: dict[str, Callable[[nn.Module], Any]] = {
    "wrapped": lambda model: _wrap(model.model.layers[0], "mlp"),
    "wrapped past setattr": lambda model: model.model.layers[0]._modules.update(
        mlp=_Wrapper(model.model.layers[0].mlp)
    ),
    "a layer around it": lambda model: _wrap(model.model.layers, "0"),
    "replaced": lambda model: setattr(model.model.layers[0], "mlp", model.model.layers[1].mlp),
    "another list": lambda model: setattr(
        model.model, "layers", nn.ModuleList(reversed(model.model.layers))
    ),
    "inserted": lambda model: model.model.layers.insert(0, model.model.layers[1]),
}


@pytest.mark.parametrize("side", ["output", "input", "added"])
@pytest.mark.parametrize("rewiring", REWIRINGS)
def test_modules_that_lose_their_places_in_the_block_are_refused(llama, ids, rewiring, side):
    model = copy.deepcopy(llama)
    with intervene(model, zero(MLP, side=side)):
        result(model, ids)
        REWIRINGS[rewiring](model)
        with pytest.raises(UnsupportedError, match="no longer the module that was there"):
            result(model, ids)
    assert not any("hooks" in name for part in hooks(model) for name in part)


def test_other_modules_may_change_in_the_block(llama, ids):
    model = copy.deepcopy(llama)
    with intervene(model, zero(MLP)):
        result(model, ids)
        _wrap(model.model.layers[0].self_attn, "q_proj")
        _wrap(model.model.layers[1], "mlp")
        changed = result(model, ids)
    nn.init.zeros_(model.model.layers[0].mlp.down_proj.weight)
    assert torch.equal(changed, result(model, ids))


# ---- blocks ---------------------------------------------------------------------------------


def test_edits_of_one_site_follow_each_other(llama, ids):
    one = torch.ones(32)
    before = output_of(llama, LAYER, ids)
    double = apply(LAYER, lambda values: 2 * values)
    assert torch.equal(output_of(llama, LAYER, ids, add(LAYER, one), double), 2 * (before + one))
    assert torch.equal(output_of(llama, LAYER, ids, double, add(LAYER, one)), 2 * before + one)
    with intervene(llama, add(LAYER, one)):
        assert torch.equal(output_of(llama, LAYER, ids, double), 2 * (before + one))
    with intervene(llama, double), intervene(llama, add(LAYER, one)):
        assert torch.equal(output_of(llama, LAYER, ids), 2 * before + one)


def test_a_capture_inside_the_block_has_the_edited_values(llama, ids, tmp_path):
    with intervene(llama, zero(MLP)), captured(llama, ids, tmp_path / "inside.stream") as reader:
        assert not reader[MLP][0].to_torch().any()


def test_nothing_is_left_in_the_model(llama, ids, clean):
    before = hooks(llama)

    def generate() -> Iterator[Tensor]:
        with intervene(llama, zero(LAYER)):
            while True:
                yield result(llama, ids)

    running = generate()
    assert not torch.equal(next(running), clean)
    assert hooks(llama) != before
    running.close()
    assert hooks(llama) == before
    for error in (RuntimeError, KeyboardInterrupt):

        def fail(values: Tensor, error: type[BaseException] = error) -> Tensor:
            raise error("stop")

        with pytest.raises(error, match="stop"):
            with intervene(llama, zero(MLP), apply(LAYER, fail)):
                result(llama, ids)
        assert hooks(llama) == before
    with pytest.raises(InvalidArgumentError):
        intervene(llama, zero(MLP), zero("model.layers.7")).__enter__()
    assert hooks(llama) == before
    assert torch.equal(result(llama, ids), clean)


def test_an_interrupted_call_does_not_disturb_the_next(llama, ids):
    stops = iter([True, False])

    def stop(values: Tensor) -> Tensor:
        if next(stops):
            raise KeyboardInterrupt
        return values

    with intervene(llama, zero(MLP, steps=1), apply(LAYER, stop)) as applied:
        with pytest.raises(KeyboardInterrupt):
            result(llama, ids)
        result(llama, ids)
    assert (applied.counts, applied.steps) == ([1, 1], 2)


@pytest.mark.parametrize(
    ("edit", "runs", "message"),
    [
        (zero(LAYER), 0, "was not applied: the model was not called in the block"),
        (zero("unused"), 1, r"zero\('unused'\) was not applied: its module did not run"),
        (zero(LAYER, calls=1), 2, "its module ran 2 times in 2 steps, and not at the calls"),
        (zero(LAYER, steps=5), 1, "its module ran 1 times in 1 steps"),
    ],
)
def test_an_edit_that_did_nothing_is_an_error(llama, ids, edit, runs, message):
    llama.unused = nn.Linear(2, 2)
    with pytest.raises(UnusedEditError, match=message):
        with intervene(llama, zero("model.embed_tokens"), edit):
            for _ in range(runs):
                result(llama, ids)
    with intervene(llama, edit, unused="ignore") as applied:
        result(llama, ids)
    assert applied.counts in ([0], [1])


def test_gradients_flow_through_edits(llama, ids):
    vector = torch.zeros(32, requires_grad=True)
    scale = torch.ones(1, requires_grad=True)
    with intervene(
        llama, add(LAYER, vector, positions=0), apply(MLP, lambda values: values * scale)
    ):
        loss = llama(ids, labels=ids).loss
        loss.backward()
    assert vector.grad is not None and vector.grad.any()
    assert llama.model.embed_tokens.weight.grad.any()

    def loss_at(value: float) -> float:
        with torch.no_grad(), intervene(llama, apply(MLP, lambda values: values * value)):
            return float(llama(ids, labels=ids).loss)

    assert scale.grad is not None
    numeric = (loss_at(1.01) - loss_at(0.99)) / 0.02
    assert scale.grad.item() == pytest.approx(numeric, rel=0.05, abs=1e-5)
    llama.zero_grad()
    with intervene(llama, freeze(LAYER)):
        for _ in range(2):  # a frozen value has no gradient, and no graph that has ended
            llama(ids, labels=ids).loss.backward()


def test_each_thread_has_its_own_block(llama, ids, clean):
    inside, done = threading.Barrier(2), threading.Barrier(2)
    found: dict[str, Tensor] = {}

    def work(layer: str) -> None:
        with intervene(llama, zero(layer)):
            inside.wait(60)
            found[layer] = result(llama, ids)
            done.wait(60)

    threads = [threading.Thread(target=work, args=(layer,)) for layer in (LAYER, MLP)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for layer in (LAYER, MLP):
        with intervene(llama, zero(layer)):
            assert torch.equal(found[layer], result(llama, ids))
    with intervene(llama, zero(LAYER), scope="process"):
        thread = threading.Thread(target=lambda: found.update(other=result(llama, ids)))
        thread.start()
        thread.join()
    assert torch.equal(found["other"], found[LAYER])


def test_a_copy_of_the_model_has_no_edits(llama, ids, clean):
    with intervene(llama, zero(LAYER)):
        result(llama, ids)
        copied = copy.deepcopy(llama)
        assert torch.equal(result(copied, ids), clean)


def test_a_compiled_model_runs_eagerly_meanwhile(llama, ids, clean):
    if not hasattr(torch.compiler, "set_stance"):
        pytest.skip("needs torch 2.6")
    compiled = torch.compile(llama, backend="eager")
    assert torch.equal(result(compiled, ids), clean)
    with intervene(llama, zero(MLP)):
        expected = result(llama, ids)
    with pytest.warns(RuntimeWarning, match="runs eagerly in the block of intervene"):
        with intervene(compiled, zero(MLP)):
            assert torch.equal(result(compiled, ids), expected)
    assert torch.equal(result(compiled, ids), clean)


# ---- refusals -------------------------------------------------------------------------------


def test_active_dropout_is_refused(of_kind, ids):
    model = of_kind("Bert").train()
    with pytest.raises(UnsupportedError, match=r"dropout is active: p = 0.1 in .* model.eval\(\)"):
        intervene(model, zero("encoder.layer.0")).__enter__()
    assert model.training and not hooks(model)[0].keys() & {"_forward_hooks"}
    model.eval()
    model.encoder.layer[1].attention.self.train()  # its dropout's p counts while it trains
    with pytest.raises(UnsupportedError, match="'encoder.layer.1.attention.self.dropout'"):
        intervene(model, zero("encoder.layer.0")).__enter__()
    llama = of_kind("Llama").train()  # without dropout
    with intervene(llama, zero("layers.0")):
        result(llama, ids)
    assert llama.training
    llama.layers[0].self_attn.attention_dropout = 0.2
    with pytest.raises(UnsupportedError, match=r"attention_dropout = 0.2 in 'layers.0.self_attn'"):
        intervene(llama, zero("layers.0")).__enter__()


class Jittered(nn.Linear):
    """As a router of experts that mixes noise into what it receives while it trains."""

    router_jitter_noise = 0.0

    def __init__(self, noise: float) -> None:
        super().__init__(4, 4)
        self.router_jitter_noise = noise


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.RReLU(), r"slopes are random: 0.125 to 0.33\d* in '1' \(RReLU\), so two runs differ"),
        (nn.BatchNorm1d(4), "statistics are of the batch in '1' .*, and each run changes those"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "each run changes those"),
        (Jittered(0.1), "noise is active: router_jitter_noise = 0.1 in '1'"),
    ],
)
def test_what_training_adds_is_refused(module, said):
    model = nn.Sequential(nn.Linear(4, 4), module)
    with pytest.raises(UnsupportedError, match=rf"{said}.*model.eval\(\)"):
        intervene(model, zero("0")).__enter__()
    with intervene(model.eval(), zero("0")):
        model(torch.ones(2, 4, 4))


@pytest.mark.parametrize(
    "module",
    [
        nn.RReLU(0.2, 0.2), nn.BatchNorm1d(4, track_running_stats=False), nn.LayerNorm(4),
        Jittered(0.0),
    ],
)  # fmt: skip
def test_training_that_adds_nothing_is_taken(module):
    model = nn.Sequential(nn.Linear(4, 4), module).train()
    with intervene(model, zero("0")):
        model(torch.ones(2, 4, 4))


def test_what_an_edit_keeps_is_freed_with_the_block(llama, ids):
    kept = [torch.zeros(1 << 20)]
    gone = weakref.ref(kept[0])
    gc.disable()
    try:
        with intervene(llama, apply(MLP, lambda value, held=kept: value + held[0][0])):
            result(llama, ids)
        del kept
        assert gone() is None
    finally:
        gc.enable()


def test_replicas_and_other_things_are_refused(llama):
    with pytest.raises(UnsupportedError, match="give model.module"):
        intervene(nn.DataParallel(llama), zero(LAYER)).__enter__()
    with pytest.raises(InvalidArgumentError, match="the model is a dict"):
        intervene({}, zero(LAYER)).__enter__()
    with pytest.raises(InvalidArgumentError, match="'model.layers.0' is no edit"):
        intervene(llama, LAYER).__enter__()
    with pytest.raises(InvalidArgumentError, match="unused = 'warn'"):
        intervene(llama, unused="warn").__enter__()
    with pytest.raises(ValueError, match="scope must be one of"):
        intervene(llama, scope="all").__enter__()


def test_recomputed_modules_are_refused(llama, ids):
    llama.train()
    llama.gradient_checkpointing_enable()
    with intervene(llama, add(f"{LAYER}.input_layernorm", torch.ones(32))):
        loss = llama(ids, labels=ids).loss
        with pytest.raises(UnsupportedError, match="gradient_checkpointing_disable"):
            loss.backward()


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda: replace(MLP, torch.zeros(2, 9, 31)), r"shape \[2, 9, 31\]; give \[2, 9, 32\]"),
        (lambda: replace(MLP, torch.zeros(1, 9, 32)), r"give \[2, 9, 32\] or \[32\]"),
        (lambda: add(MLP, torch.zeros(9, 32)), r"values has the shape \[9, 32\]"),
        (lambda: add(MLP, torch.zeros(1)), r"values has the shape \[1\]"),
        (lambda: add(MLP, torch.zeros(32).half()), r"convert it with .to\(torch.float32\)"),
        (lambda: replace(MLP, torch.zeros(32, device="meta")), r'move it with .to\("cpu"\)'),
        (lambda: apply(MLP, lambda values: values[:1]), r"returned the shape \[1, 9, 32\]"),
        (lambda: apply(MLP, lambda values: values.half()), "the edit returned is torch.float1"),
        (lambda: apply(MLP, lambda values: None), "returned a NoneType, not a tensor"),
        (lambda: mean(MLP, torch.zeros(0, 32)), "of is empty"),
        (lambda: mean(MLP, torch.zeros(3, 8, 32), over="sequences"), r"\[sequences, 9, 32\]"),
        (lambda: resample(MLP, torch.zeros(3, 8, 32)), r"examples have \[9, 32\]"),
        (lambda: resample(MLP, torch.zeros(0, 9, 32)), "of has no examples"),
        (lambda: zero(f"{LAYER}.self_attn[1][0]"), "'model.layers.0.self_attn' returns no tensor"),
        (lambda: zero("model.rotary_emb", sequences=1), r"\[1, 9, 8\], and the model was given"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(llama, ids, edit, message):
    with intervene(llama, edit(), unused="ignore"):
        with pytest.raises(InvalidArgumentError, match=message):
            result(llama, ids)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: add(MLP, [1.0]), "values is a list: give a tensor"),
        (lambda: add(MLP, torch.ones(1), scale=float("nan")), "scale = nan"),
        (lambda: replace(MLP, "run.stream"), "values is a str: give a tensor, an ActivationReader"),
        (lambda: mean(MLP, 3), "of is a int"),
        (lambda: mean(MLP, over="batch"), "over = 'batch'"),
        (lambda: noise(MLP, -1), "scale = -1"),
        (lambda: noise(MLP, 1, unit="variance"), "unit = 'variance'"),
    ],
)
def test_arguments_of_edits_are_checked_at_once(make, message):
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_integers_are_replaced_and_not_averaged(build, ids):
    model = build("mixtral")
    layer = "model.layers.0.mlp.gate[2]"  # the experts that tokens go to
    chosen = output_of(model, layer, ids)
    assert chosen.dtype == torch.int64
    other = (chosen + 1) % 4
    assert torch.equal(output_of(model, layer, ids, replace(layer, other)), other)
    for edit in (mean(layer), noise(layer, 1.0)):
        with intervene(model, edit, unused="ignore"):
            with pytest.raises(UnsupportedError, match="needs floats, not torch.int64"):
                result(model, ids)


def test_quantized_models_are_edited_where_they_return_floats(ids):
    class Quantized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Identity(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            quantized = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
            return self.outside(self.inside(quantized).dequantize())

    model = Quantized()
    with intervene(model, zero("outside")):
        assert not model(torch.ones(2, 3)).any()
    with intervene(model, zero("inside"), unused="ignore"):
        with pytest.raises(UnsupportedError, match="the tensor is quantized"):
            model(torch.ones(2, 3))


def test_a_key_value_cache_is_refused(llama, ids):
    with intervene(llama, zero(f"['{CACHE_NAME}'][0].keys"), unused="ignore"):
        with pytest.raises(UnsupportedError, match="is in a key-value cache"):
            result(llama, ids)


def test_the_first_output_of_a_model_needs_no_place(llama, ids, clean):
    with intervene(llama, zero("", positions=0)):
        logits = result(llama, ids)
    assert not logits[:, 0].any() and torch.equal(logits[:, 1:], clean[:, 1:])
