"""A step is an outermost call into the captured model, of the model itself or of a part of it."""

from __future__ import annotations

import asyncio
import threading
import weakref

import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    capture_activations,
    for_request,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("each_kind_of_hooks")


def steps_of(path) -> dict[int | None, list[str]]:
    """The layers of each step, in the order of their packets."""
    found: dict[int | None, list[str]] = {}
    with ActivationReader(path) as reader:
        for activation in reader:
            found.setdefault(activation.step, []).append(activation.layer)
    return found


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


class Deep(nn.Module):
    """A model with modules two and three levels below it, and methods that call them."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Sequential(Inner(), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x)

    def only_first(self, x: Tensor) -> Tensor:
        return self.outer[0].first(x)

    def one_after_the_other(self, x: Tensor) -> Tensor:
        return self.outer[0].second(self.outer[0].first(x))

    def generate(self, x: Tensor, n: int) -> Tensor:
        for _ in range(n):
            x = self(x)
        return x

    def train_parts(self, x: Tensor, n: int) -> None:
        for _ in range(n):
            self.outer[0].second(self.outer[0].first(x))


X = torch.randn(2, 4)
INNER = ["outer.0.first", "outer.0.second", "outer.0"]
WHOLE = [*INNER, "outer.1", "outer", ""]


@pytest.mark.parametrize("include", [None, "outer.0.*"], ids=["all", "those inside"])
def test_a_call_of_a_module_below_the_models_children_is_a_step(path, include):
    model = Deep()
    config = InstrumentationConfig.balanced().with_layers(include or "*")
    inner = INNER if include is None else INNER[:2]
    whole = WHOLE if include is None else INNER[:2]
    with torch.no_grad(), capture_activations(model, path, config=config) as framework:
        model.outer[0](X)
        model(X)
        model.outer[0].first(X)
        model.outer[0](X)
        model(X)
    assert framework.stats().steps == 5
    assert list(steps_of(path).values()) == [inner, whole, INNER[:1], inner, whole]


def test_generation_within_a_wrapper_as_that_of_peft(llama, ids, path):
    wrapper = nn.Module()
    wrapper.base_model = nn.Module()
    wrapper.base_model.model = llama
    with torch.no_grad(), capture_activations(wrapper, path):
        llama.generate(ids, max_new_tokens=3, do_sample=False)
    with ActivationReader(path) as reader:
        assert reader.steps == (0, 1, 2)
        assert all(a.step is not None and a.call == 0 for a in reader)


def test_calls_one_after_the_other_in_a_method_of_the_model_are_one_step(path):
    model = Deep()
    with torch.no_grad(), capture_activations(model, path) as framework:
        model.one_after_the_other(X)
        model.one_after_the_other(X)
        model.only_first(X)
        model.train_parts(X, 2)
    assert framework.stats().steps == 5
    assert list(steps_of(path).values()) == [INNER[:2], INNER[:2], INNER[:1], INNER[:2], INNER[:2]]


def test_a_loop_in_a_method_makes_steps(path):
    model = Deep()
    with torch.no_grad(), capture_activations(model, path):
        model.generate(X, 3)
    assert list(steps_of(path).values()) == [WHOLE] * 3


def test_calls_one_after_the_other_outside_of_the_model_are_steps(path):
    model = Deep()

    class Runner:
        def go(self) -> None:
            model.outer[0].first(X)
            model.outer[0].second(X)

    with torch.no_grad(), capture_activations(model, path):
        model.outer[0].first(X)
        model.outer[0].second(X)
        Runner().go()
    assert list(steps_of(path).values()) == [INNER[:1], INNER[1:2]] * 2


def clip():
    import transformers as hf

    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }  # fmt: skip
    text = {**sizes, "vocab_size": 97, "max_position_embeddings": 20, "eos_token_id": 2}
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision)).eval()


def test_clips_text_features_are_one_step(ids, path):
    model = clip()
    with torch.no_grad(), capture_activations(model, path) as framework:
        model.get_text_features(ids)
        model.get_image_features(torch.randn(1, 3, 16, 16))
        model.get_text_features(ids)
    assert framework.stats().steps == 3
    with ActivationReader(path) as reader:
        assert [a.step for a in reader["text_projection"]] == [0, 2]
        assert [a.step for a in reader["visual_projection"]] == [1]


@pytest.mark.parametrize("encoder", ["model.encoder", "encoder"], ids=["bart", "t5"])
def test_an_encoder_that_generation_calls_by_itself(encoder, build, ids, path):
    """The separate call of the encoder is step 0, and each token's call is a further step."""
    import transformers as hf

    if encoder == "encoder":
        model = build("t5")
    else:
        model = hf.BartForConditionalGeneration(
            hf.BartConfig(
                vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1,
                encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
                decoder_ffn_dim=48, bos_token_id=1, eos_token_id=None, pad_token_id=0,
                decoder_start_token_id=2, forced_eos_token_id=None,
            )
        ).eval()  # fmt: skip
    with torch.no_grad(), capture_activations(model, path):
        model.generate(ids, max_new_tokens=3, do_sample=False, num_beams=1)
    with ActivationReader(path) as reader:
        assert reader.steps == (0, 1, 2, 3)
        assert {a.step for a in reader if a.layer.startswith(encoder)} == {0}
        assert None not in {a.step for a in reader}


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_in_a_backward_pass_is_marked(reentrant, path):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Inner(), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=reentrant)).sum()

    model = Checkpointed()
    x = X.clone().requires_grad_()
    with capture_activations(model, path) as framework:
        for _ in range(2):
            model(x).backward()
    assert framework.stats().steps == 2
    with ActivationReader(path) as reader:
        again = [a for a in reader if a.path == "!recomputed"]
        # The non-reentrant way stops as soon as it has the tensors that the gradients need.
        body = ["body.first", "body.second", "body"] if reentrant else ["body.first"]
        assert [a.layer for a in again] == 2 * body
        assert {(a.step, a.token) for a in again} == {(None, None)}
        for twin in again:
            assert torch.equal(twin.to_torch(), reader[twin.layer].at(step=0).to_torch())
        assert [a.step for a in reader[""]] == [0, 1]


def test_requests_through_one_method_are_steps_of_their_own(path):
    model = Deep()

    def first(x: Tensor) -> None:
        with for_request("alice"):
            model.only_first(x)

    def parts(self: Deep, x: Tensor) -> None:
        with for_request("bob"):
            self.outer[0].first(x)
        with for_request("carol"):
            self.outer[0].second(x)

    with torch.no_grad(), capture_activations(model, path):
        first(X)
        parts(model, X)
    with ActivationReader(path) as reader:
        assert [(a.layer, a.step, a.request) for a in reader] == [
            ("outer.0.first", 0, "alice"), ("outer.0.first", 1, "bob"),
            ("outer.0.second", 2, "carol"),
        ]  # fmt: skip


def test_two_calls_of_a_method_are_two_steps(path):
    """The second call's frame may reuse the memory of the first call's frame."""

    class Chooses(Deep):
        def part(self, which: int) -> None:
            if which == 0:
                self.outer[0].first(X)
            else:
                self.outer[0].second(X)

    model = Chooses()
    with torch.no_grad(), capture_activations(model, path):
        for which in (0, 1, 0, 1):
            model.part(which)
    assert list(steps_of(path).values()) == [INNER[:1], INNER[1:2]] * 2


@pytest.mark.parametrize("deep", [True, False])
def test_a_step_keeps_nothing_of_its_callers(path, deep):
    """The local tensors of the calling function are freed when it returns."""
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4))))
    entered = model[0][0][0] if deep else model

    def use() -> list[weakref.ref[Tensor]]:
        given, other = torch.zeros(2, 4), torch.zeros(5)
        entered(given)
        return [weakref.ref(given), weakref.ref(other)]

    with torch.no_grad(), capture_activations(model, path):
        assert [held() for held in use()] == [None, None]


def test_a_method_lets_go_of_what_it_deletes(path):
    class Deletes(Deep):
        def both(self, x: Tensor) -> bool:
            h = self.outer[0].first(x)
            held = weakref.ref(h)
            self.outer[0].second(h)
            del h
            return held() is None

    model = Deletes()
    with torch.no_grad(), capture_activations(model, path):
        assert model.both(X)


def test_a_coroutines_calls_are_steps_of_their_own(path):
    """Other tasks may call the model while the coroutine waits, so each call is a step."""

    class Waits(Deep):
        async def both(self, x: Tensor) -> None:
            self.outer[0].first(x)
            await asyncio.sleep(0)
            self.outer[0].second(x)

    async def twice() -> None:
        await asyncio.gather(model.both(X), model.both(X))

    model = Waits()
    with torch.no_grad(), capture_activations(model, path):
        asyncio.run(model.both(X))
        asyncio.run(twice())
    assert list(steps_of(path).values()) == [
        INNER[:1], INNER[1:2], INNER[:1], INNER[:1], INNER[1:2], INNER[1:2],
    ]  # fmt: skip


def test_a_model_that_is_a_part_of_another_one(path):
    """If a model and a part of it are both captured, a call of the model is one step of both."""
    whole = Deep()
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(whole)
    framework.instrument_model(whole.outer[0])
    with torch.no_grad(), framework.capture_activations(path):
        whole.outer[0](X)
        whole(X)
    with ActivationReader(path) as reader:
        assert reader.steps == (0, 1)
        assert [a.step for a in reader.select("outer.0")] == [0, 1]
        assert [a.step for a in reader if a.model == "inner" and a.name == ""] == [0, 1]


def test_another_threads_backward_pass_is_not_of_this_scope(path):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False).sum()

    model = Checkpointed()
    with capture_activations(model, path, scope="thread"):
        with torch.no_grad():
            model(X)
        x = X.clone().requires_grad_()
        thread = threading.Thread(target=lambda: model(x).backward())
        thread.start()
        thread.join()
    assert list(steps_of(path)) == [0]
