"""Padding is no token, whatever tells it, and where nothing tells it that is said."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    annotate,
    capture_activations,
)
from llm_instrumentation.analysis.dataset import ActivationDataset
from llm_instrumentation.errors import UnsupportedError
from llm_instrumentation.interventions import apply, intervene, mean
from torch import Tensor, nn

LOSSLESS = InstrumentationConfig.max().with_float32()
PROMPTS = torch.tensor([[0, 0, 0, 6, 7], [5, 8, 9, 10, 11], [0, 12, 13, 14, 15]])
SETTINGS: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None, "initializer_range": 0.3,
}  # fmt: skip
LAYER = "model.layers.1"


def decoder(kind: str = "Llama", attention: str = "sdpa", **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SETTINGS, **settings)
    config._attn_implementation = attention
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def gemma(attention: str) -> nn.Module:
    """Gives its layers masks by their kinds; two tokens are a window."""
    kinds = ["sliding_attention", "full_attention"]
    kind = "Gemma3Text" if hasattr(transformers, "Gemma3TextConfig") else "Gemma2"
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **SETTINGS, head_dim=8, sliding_window=3, layer_types=kinds
    )
    config._attn_implementation = attention
    name = "Gemma3ForCausalLM" if kind == "Gemma3Text" else "Gemma2ForCausalLM"
    return getattr(transformers, name)(config).eval()


MODELS = {
    "full": lambda attention: decoder("Llama", attention),
    "window": lambda attention: decoder("Mistral", attention, sliding_window=3),
    "both": gemma,
}


def texts(generated: Tensor, prompts: Tensor = PROMPTS) -> list[list[int]]:
    """The tokens that the model was given of each text: no padding, and not the last one."""
    found = []
    for row, prompt in zip(generated.tolist(), prompts.tolist(), strict=True):
        begin = next(place for place, token in enumerate(prompt) if token)
        end = len(row) - 1
        while row[end] == 0:
            end -= 1
        found.append(row[begin : end + (row[-1] == 0)])
    return found


# ---- masks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model", MODELS)
def test_rows_of_a_generation_with_left_padding(path, model, attention, cache):
    """A static cache has masks of queries and keys, by kind of layer where there are several."""
    model = MODELS[model](attention)
    how = {} if cache is None else {"cache_implementation": cache}
    mask = (PROMPTS != 0).long()
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        with annotate(document=["a", "b", "c"]):
            generated = model.generate(
                PROMPTS, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0,
                **how,
            )  # fmt: skip
    expected = texts(generated)
    with ActivationReader(path) as reader:
        rows = reader.rows(LAYER)
        for document, tokens in zip("abc", expected, strict=True):
            its = rows.select(document=document)
            assert its.column("token_id").tolist() == tokens
            assert its.column("position").tolist() == list(range(len(tokens)))
            assert len(set(its.column("sequence").tolist())) == 1
        assert not rows.column("padding").any()
        every = reader.rows(LAYER, padding=True)
        assert (every.column("padding") == 1).sum() == len(every) - len(rows) == 4
    batches = ActivationDataset(path, LAYER, batch_size=4)
    assert sum(len(batch["token_id"]) for batch in batches) == sum(map(len, expected))


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}, {"use_cache": False}])
def test_texts_that_have_ended_get_no_more_tokens(path, how):
    """`generate` gives them padding, with a mask that keeps it, until the last text ends."""
    model, mask = decoder(), (PROMPTS != 0).long()
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, **how}
    with torch.no_grad():
        whole = model.generate(PROMPTS, pad_token_id=0, **settings)
        ends = [int(whole[0, 6]), int(whole[2, 8])]
        with capture_activations(model, path, config=LOSSLESS):
            generated = model.generate(PROMPTS, pad_token_id=0, eos_token_id=ends, **settings)
    expected = texts(generated)
    assert len({len(tokens) for tokens in expected}) > 1
    with ActivationReader(path) as reader:
        rows = reader.rows(LAYER)
        if "use_cache" in how:  # each step has the whole texts
            rows = rows.select(step=max(reader.steps))
        found = [
            rows[rows.column("batch_row") == row].column("token_id").tolist() for row in range(3)
        ]
        assert found == expected
        if "use_cache" not in how:
            assert sorted(set(rows.column("sequence").tolist())) == [0, 1, 2]


def masks_of(mask: Tensor) -> dict[str, Any]:
    """A mask in the forms that models take, without a cache."""
    causal = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()
    seen = (causal & mask.bool()[:, None])[:, None]
    opened = seen | ~seen.any(-1, keepdim=True)
    return {
        "integers": mask,
        "booleans": mask.bool(),
        "added": torch.zeros(mask.shape).masked_fill(mask == 0, -torch.inf),
        "queries and keys": opened,
        "queries and keys, added": torch.zeros(seen.shape).masked_fill(
            ~opened, torch.finfo(torch.float32).min
        ),
        "by kind of layer": {"full_attention": opened, "sliding_attention": opened},
    }


class Embeds(nn.Module):
    """Takes masks of any form, and ignores them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(40, 8), nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, **others: Any) -> Tensor:
        return self.head(self.embed(input_ids))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", masks_of(torch.ones(1, 1)))
def test_masks_of_all_forms(path, form, side):
    ids = PROMPTS if side == "left" else PROMPTS.flip(1)
    real, model = ids != 0, Embeds()
    mask = masks_of(real.long())[form]
    means = []
    with torch.no_grad():
        with capture_activations(model, path, config=LOSSLESS):
            model(ids, attention_mask=mask)
        with intervene(model, mean("embed"), apply("embed", lambda v: (means.append(v), v)[1])):
            model(ids, attention_mask=mask)
    with ActivationReader(path) as reader:
        rows = reader.rows("embed")
        assert rows.column("token_id").tolist() == ids[real].tolist()
        positions = [place for length in real.sum(1).tolist() for place in range(length)]
        assert rows.column("position").tolist() == positions
        assert torch.equal(rows.to_torch(), model.embed(ids)[real])
    assert torch.allclose(means[0][0, 0], model.embed(ids)[real].mean(0), atol=1e-6)


def test_means_leave_out_texts_that_have_ended():
    model, mask = decoder(), (PROMPTS != 0).long()
    settings = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    before: list[Tensor] = []
    after: list[Tensor] = []
    edits = (
        apply(LAYER, lambda v: (before.append(v), v)[1]),
        mean(LAYER),
        apply(LAYER, lambda v: (after.append(v), v)[1]),
    )
    with torch.no_grad(), intervene(model, *edits):
        # All texts of a batch get the same means, so they go on alike. One ends by its own rule.
        end = transformers.StoppingCriteriaList([EndOfOne(row=1, length=8)])
        generated = model.generate(PROMPTS, stopping_criteria=end, **settings)
    assert generated[1, 8:].tolist() == [0] * 5 and (generated[[0, 2], 8:] != 0).all()
    for column, (own, found) in enumerate(zip(before[1:], after[1:], strict=True), 5):
        real = torch.tensor([True, column < 8, True])
        assert torch.allclose(found[0, 0], own[real, 0].mean(0), atol=1e-5), column


class EndOfOne(transformers.StoppingCriteria):
    """Ends one text of a batch at a length."""

    eos_token_id = None  # a generation gives padding to what such a rule has ended

    def __init__(self, row: int, length: int) -> None:
        self.row, self.length = row, length

    def __call__(self, input_ids: Tensor, scores: Any, **others: Any) -> Tensor:
        done = torch.zeros(len(input_ids), dtype=torch.bool)
        done[self.row] = input_ids.shape[1] >= self.length
        return done


# ---- where nothing tells it -------------------------------------------------------------------


UNREAD = {
    "an object": {"attention_mask": SimpleNamespace(shape=(3, 5))},
    "fewer columns": {"attention_mask": torch.ones(3, 4)},
    "torch's name": {"src_key_padding_mask": PROMPTS == 0},
    "padding sees itself": {
        "attention_mask": masks_of((PROMPTS != 0).long())["queries and keys"]
        & ~(PROMPTS == 0)[:, None, :, None]
        | torch.eye(PROMPTS.shape[1], dtype=torch.bool)
    },
    "small numbers": {
        "attention_mask": masks_of((PROMPTS != 0).long())["queries and keys, added"].clamp(-1000)
    },
    "lengths": {"seq_lens": (PROMPTS != 0).sum(1)},
}


@pytest.mark.parametrize("form", UNREAD)
def test_a_mask_that_cannot_be_read_makes_padding_unknown(path, form):
    model = Embeds()
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        model(PROMPTS, **UNREAD[form])
        model(PROMPTS)  # without a mask all are tokens
    with ActivationReader(path) as reader:
        with pytest.warns(RuntimeWarning, match="1 activations of 'embed' .* which tokens are pad"):
            rows = reader.rows("embed")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is told once
            reader.rows("head")
        assert rows.unknown_padding == 1
        unknown = rows.select(step=0)
        assert len(unknown) == PROMPTS.numel()
        assert set(unknown.column("padding").tolist()) == {-1}
        assert set(unknown.column("position").tolist()) == {-1}
        known = rows.select(step=1)
        assert set(known.column("padding").tolist()) == {0}
        assert known.column("position").tolist() == [*range(5)] * 3
    with torch.no_grad(), intervene(model, mean("embed")):
        with pytest.raises(UnsupportedError, match="does not say which tokens are padding"):
            model(PROMPTS, **UNREAD[form])
        model(PROMPTS)


@pytest.mark.parametrize("added", [False, True])
def test_a_causal_mask_of_as_many_rows_as_tokens_tells_no_padding(path, added):
    """It may be one mask [queries, keys] for all texts."""
    model, ids = Embeds(), torch.arange(1, 17).view(4, 4)
    mask = torch.ones(4, 4).tril()
    if added:
        mask = torch.zeros(4, 4).masked_fill(mask == 0, -torch.inf)
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        model(ids, attention_mask=mask)
        model(ids[:2])
    with ActivationReader(path) as reader, pytest.warns(RuntimeWarning, match="which tokens are"):
        rows = reader.rows("embed")
        assert (len(rows), rows.unknown_padding) == (16 + 8, 1)
    with torch.no_grad(), pytest.raises(UnsupportedError), intervene(model, mean("embed")):
        model(ids, attention_mask=mask)


@pytest.mark.parametrize("kind", ["XLM", "Flaubert"])
def test_lengths_and_the_models_own_padding(path, kind):
    """These models take lengths in place of a mask, and without any the ids that are no padding."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=50, emb_dim=16, n_layers=2, n_heads=2, pad_token_id=0, bos_token_id=1
    )
    model = getattr(transformers, f"{kind}Model")(config).eval()
    ids = torch.tensor([[6, 7, 8, 9, 9], [8, 9, 10, 11, 12]])
    its = ids.masked_fill(ids == 9, config.pad_index)
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        model(ids, lengths=torch.tensor([3, 5]))
        model(its[:1])
    with ActivationReader(path) as reader:
        rows = reader.rows("layer_norm2.1")
        assert rows.select(step=0).column("token_id").tolist() == [6, 7, 8, 8, 9, 10, 11, 12]
        assert rows.select(step=1).column("token_id").tolist() == [6, 7, 8]


def test_a_model_that_hides_one_id_by_itself(path):
    config = transformers.DPRConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24,
    )  # fmt: skip
    model = transformers.DPRQuestionEncoder(config).eval()
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        model(torch.tensor([[6, 7, 0, 0], [6, 7, 8, 9]]))
    with ActivationReader(path) as reader:
        layer = next(name for name in reader.layers if name.endswith("encoder.layer.1"))
        assert reader.rows(layer).column("token_id").tolist() == [6, 7, 6, 7, 8, 9]


def test_texts_that_share_a_row_without_packing_have_no_known_sequence(path):
    """Their position ids begin again."""
    model = decoder()
    places = torch.tensor([[0, 1, 2, 0, 1]])
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        model(PROMPTS[:1], position_ids=places)
        model(PROMPTS[:1], position_ids=torch.arange(5)[None])
    with ActivationReader(path) as reader:
        sequences = reader.rows(LAYER).column("sequence").tolist()
    assert set(sequences[:5]) == {-1} and -1 not in sequences[5:]


# ---- whose call it is -------------------------------------------------------------------------


class Wrapper(nn.Module):
    """Passes its arguments on."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("wrap", [Wrapper, nn.DataParallel, lambda model: Wrapper(Wrapper(model))])
@pytest.mark.parametrize("directly", [False, True])
def test_arguments_by_position_through_a_wrapper(path, wrap, directly):
    model, mask = decoder(), (PROMPTS != 0).long()
    wrapped = wrap(model)
    with torch.no_grad(), capture_activations(wrapped, path, config=LOSSLESS):
        (wrapped.forward if directly else wrapped)(PROMPTS, mask)
    with ActivationReader(path) as reader:
        layer = next(name for name in reader.layers if name.endswith(LAYER))
        assert reader.rows(layer).column("token_id").tolist() == PROMPTS[mask == 1].tolist()


def test_a_positional_argument_without_a_name_may_be_a_mask(path):
    class Takes(Embeds):
        def forward(self, *args: Any) -> Tensor:
            return super().forward(args[0])

    model = Takes()
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        model(PROMPTS, (PROMPTS != 0).long())
    with ActivationReader(path) as reader, pytest.warns(RuntimeWarning, match="which tokens are"):
        assert reader.rows("embed").unknown_padding == 1


def test_a_second_pass_of_a_step_ends_texts_as_the_first(path):
    """Guidance runs the model twice in each step, with and without the prompt."""
    model, mask = decoder(), (PROMPTS != 0).long()
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        whole = model.generate(PROMPTS, guidance_scale=1.5, **settings)
        end = int(whole[1, 6])
        with capture_activations(model, path, config=LOSSLESS):
            model.generate(PROMPTS, guidance_scale=1.5, eos_token_id=end, **settings)
    with ActivationReader(path) as reader:
        rows = reader.rows(LAYER)
        ends = [
            rows[rows.column("sequence") == one].column("token_id").tolist().count(end)
            for one in sorted(set(rows.column("sequence").tolist()))
        ]
    texts_with_end = ends[:3]
    assert texts_with_end[1] == 1 and ends[3:] == texts_with_end


def test_a_forward_that_is_called_as_a_method_is_the_models_call(path):
    model, mask = decoder(), (PROMPTS != 0).long()
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        model.forward(input_ids=PROMPTS, attention_mask=mask)
        model.model.forward(PROMPTS, mask)
    with ActivationReader(path) as reader:
        assert reader.steps == (0, 1)
        rows = reader.rows(LAYER)
        for step in reader.steps:
            its = rows.select(step=step)
            assert its.column("token_id").tolist() == PROMPTS[mask == 1].tolist()
        assert torch.equal(rows.select(step=0).to_torch(), rows.select(step=1).to_torch())


def test_a_loop_of_forwards_with_a_cache_has_one_sequence(path):
    model, ids = decoder(), torch.tensor([[5, 6, 7, 8, 9]])
    cache = transformers.DynamicCache()
    names = ("cache", "past_key_values")
    name = next(n for n in names if n in model.forward.__doc__ or n == names[-1])
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        for part in (ids[:, :3], ids[:, 3:4], ids[:, 4:]):
            model.forward(input_ids=part, use_cache=True, **{name: cache})
    with ActivationReader(path) as reader:
        rows = reader.rows(LAYER)
        assert rows.column("token_id").tolist() == ids[0].tolist()
        assert rows.column("position").tolist() == [0, 1, 2, 3, 4]
        assert set(rows.column("sequence").tolist()) == {0}
        assert rows.column("step").tolist() == [0, 0, 0, 1, 2]


@pytest.mark.parametrize("how", ["called", "forward"])
def test_a_batch_in_one_mapping_is_the_text(path, how):
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Embeds()

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            return {**features, "vectors": self.inner.forward(**features)}

    model = Wrapper()
    batch = transformers.BatchEncoding(
        {"input_ids": PROMPTS, "attention_mask": (PROMPTS != 0).long()}
    )
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        model(batch) if how == "called" else model.forward(batch)
    with ActivationReader(path) as reader:
        rows = reader.rows("inner.embed")
        assert rows.column("token_id").tolist() == PROMPTS[PROMPTS != 0].tolist()


def test_the_embedding_of_virtual_tokens_is_no_text(path):
    """As prompt tuning has one, which is called by itself, with numbers of its own."""

    class Tuned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt, self.model = nn.Embedding(3, 8), Embeds()

        def generate(self, ids: Tensor) -> Tensor:
            self.prompt(torch.arange(3)[None])
            return self(ids)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.model(input_ids)

    model = Tuned()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        with capture_activations(model, path, config=LOSSLESS):
            with annotate(document=["a", "b", "c"]):
                model.generate(PROMPTS)
    with ActivationReader(path) as reader:
        rows = reader.rows("model.embed")
        assert sorted(set(rows.column("sequence").tolist())) == [0, 1, 2]
        assert rows.select(document="b").column("token_id").tolist() == PROMPTS[1].tolist()
