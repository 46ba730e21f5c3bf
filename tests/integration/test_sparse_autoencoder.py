"""Sparse autoencoders are trained on captures, saved for SAELens, and evaluated."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_instrumentation import InstrumentationConfig, capture_activations
from llm_instrumentation.analysis.dataset import ActivationDataset
from llm_instrumentation.analysis.rows import NotTokenAlignedError
from llm_instrumentation.analysis.sae.training import SAETraining, TrainingSettings, batches_of
from llm_instrumentation.analysis.sparse_autoencoder import (
    NonFiniteLossError,
    StateError,
    activation_batches,
    architectures,
    cross_entropy_score,
    evaluate_sae,
    load_saes,
    plot_losses,
    reconstruction,
    spliced,
    train_sae,
)
from llm_instrumentation.cli import main
from llm_instrumentation.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedError,
)
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore:decoder_init_norm must be")  # of SAELens

LOSSLESS = InstrumentationConfig.max().with_float32()
FEATURES = 32
# What an architecture cannot do without, or what makes it sparse within a few steps.
OPTIONS: dict[str, dict[str, Any]] = {
    "abstopk": {"k": 4},
    "batchtopk": {"k": 4, "topk_threshold_lr": 0.1},
    "matching_pursuit": {"max_iterations": 4},
    "matryoshka_batchtopk": {"k": 4, "topk_threshold_lr": 0.1, "matryoshka_widths": [8, 32]},
    "topk": {"k": 4},
}


# Those of SAELens, whose import takes seconds.
ARCHITECTURES = [
    "abstopk", "batchtopk", "gated", "jumprelu", "matching_pursuit", "matryoshka_batchtopk",
    "standard", "topk",
]  # fmt: skip


class Given(nn.Module):
    """Returns vectors that were made before, step by step, from modules of the names given."""

    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        self.values = values  # [steps, texts, tokens, ...] each
        for name in values:
            self.add_module(name, nn.Identity())
        self.step = 0

    def forward(self, input_ids: Tensor) -> None:
        for name, values in self.values.items():
            self.get_submodule(name)(values[self.step])
        self.step += 1


def captured(path: Path, config: InstrumentationConfig = LOSSLESS, **values: Tensor) -> Path:
    """Captures vectors [steps, texts, tokens, ...] as the outputs of a model's modules."""
    model = Given(**values)
    steps, texts, tokens = next(iter(values.values())).shape[:3]
    with torch.no_grad(), capture_activations(model, path, config=config):
        for step in range(steps):
            model(torch.arange(texts * tokens).view(texts, tokens) + step)
    return path


def vectors(width: int, seed: int = 0, steps: int = 8) -> Tensor:
    """Correlated vectors away from the origin, [steps, 4, 32, width]."""
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randn(steps, 4, 32, width, generator=random).relu() @ torch.randn(
        width, width, generator=random
    )
    return mixed / width**0.5 + 0.5


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A capture with two layers, `wide` of 24 values and `narrow` of 10."""
    folder = tmp_path_factory.mktemp("run")
    return captured(folder / "run.stream", wide=vectors(24), narrow=vectors(10, 1))


def data_set(path: Path, layers: Any = "wide", **how: Any) -> ActivationDataset:
    return ActivationDataset(path, layers, **{"batch_size": 64, "shuffle": "pool", **how})


def train(data: ActivationDataset, out: Path, **how: Any) -> Any:
    given = {"architecture": "topk", "width": FEATURES, "steps": 20, "lr": 3e-3}
    if how.get("architecture", "topk") == "topk":
        given["options"] = {"k": 4}
    return train_sae(data, out, **{**given, **how})


# ---- architectures --------------------------------------------------------------------------


def test_the_architectures_are_those_of_saelens():
    import sae_lens.registry

    assert sorted(sae_lens.registry.SAE_TRAINING_CLASS_REGISTRY) == ARCHITECTURES
    assert list(architectures()) == ARCHITECTURES


@pytest.mark.parametrize("normalize", ["none", "expected_average_only_in"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_saelens_loads_what_was_trained(run, tmp_path, architecture, normalize):
    from sae_lens import SAE

    data = data_set(run)
    settings = TrainingSettings(
        architecture, FEATURES, 30, normalize, "mean", 0, "float32", OPTIONS.get(architecture, {}),
        {"lr": 3e-3},
    )  # fmt: skip
    training = SAETraining(data, settings, "cpu")
    training.prepare(lambda *_: None)
    training.run(30, batches_of(data), lambda *_: None)
    trained = copy.deepcopy(training.trainers["wide"].sae)
    scale = training.trainers["wide"].activation_scaler.scaling_factor or 1.0
    assert (scale == 1) == (normalize == "none")

    (folder,) = training.finish(tmp_path).values()
    assert sorted(path.name for path in folder.iterdir()) == ["cfg.json", "sae_weights.safetensors"]
    loaded = SAE.load_from_disk(folder)
    rows = vectors(24, seed=5).reshape(-1, 24)
    with torch.no_grad():
        if "batchtopk" in architecture:  # in training the batch decides, later a threshold
            norms = trained.W_dec.norm(dim=1)
            pre = ((rows * scale - trained.b_dec) @ trained.W_enc + trained.b_enc) * norms
            features = pre * (pre > trained.topk_threshold)
            expected = (features / norms) @ trained.W_dec + trained.b_dec
        else:
            features = trained.encode(rows * scale)
            expected = trained.decode(features)
        expected = expected / scale
        found = loaded(rows)
    assert features.any(), "the test needs features"
    if architecture.endswith("topk"):
        # Of two features that differ by a rounding error, either one may be among the k largest.
        same = ((loaded.encode(rows) != 0) == (features != 0)).all(dim=1)
        assert same.float().mean() > 0.99
        found, expected = found[same], expected[same]
    assert ((found - expected).norm() / expected.norm()).item() < 1e-6
    assert (found - expected).abs().max() < 1e-6 * rows.abs().max().clamp(min=1)
    assert (loaded.encode(rows) != 0).float().mean().item() == pytest.approx(
        (features != 0).float().mean().item(), rel=1e-3
    )


def test_thresholds_that_a_step_left_below_zero_are_saved_as_zero(run, tmp_path):
    """SAELens' training and its inference differ below zero."""
    data = data_set(run)
    settings = TrainingSettings(
        "jumprelu", FEATURES, 1, "none", "mean", 0, "float32",
        {"jumprelu_init_threshold": -1.0}, {"lr": 1e-3},
    )  # fmt: skip
    training = SAETraining(data, settings, "cpu")
    assert (training.trainers["wide"].sae.threshold < 0).all()
    training.finish(tmp_path)
    (sae,) = load_saes(tmp_path / "wide").values()
    assert (sae.threshold == 0).all()


# ---- training -------------------------------------------------------------------------------


def test_layers_are_trained_in_one_pass_as_each_would_be_alone(run, tmp_path):
    both = train(data_set(run, ["wide", "narrow"]), tmp_path / "both")
    assert both.steps == 20 and both.rows == 20 * 64 and both.resumed_at == 0
    for layer in ("wide", "narrow"):
        pool = data_set(run, ["wide", "narrow"]).pool_rows
        alone = train(data_set(run, layer, pool_rows=pool), tmp_path / layer)
        one, two = (load_saes(report.saes[layer])[layer] for report in (both, alone))
        assert one.cfg.metadata.hook_name == layer
        if layer == "wide":  # the first: its first weights are drawn first too
            assert torch.equal(one.W_enc, two.W_enc) and torch.equal(one.W_dec, two.W_dec)
        assert both.losses[layer] == pytest.approx(alone.losses[layer], rel=0.2)
    assert set(load_saes(both.path)) == {"wide", "narrow"}


def test_the_first_pass_gives_scale_and_bias_in_float64(run, tmp_path):
    data = data_set(run)
    settings = TrainingSettings(
        "topk", FEATURES, 1, "expected_average_only_in", "mean", 0, "float32", {"k": 4},
        {"lr": 1e-3},
    )  # fmt: skip
    training = SAETraining(data, settings, "cpu")
    before = data.state_dict()
    training.prepare(lambda *_: None)
    assert data.state_dict() == before
    rows = vectors(24).reshape(-1, 24).numpy().astype(np.float64)
    scale = math.sqrt(24) / np.linalg.norm(rows, axis=1).mean()
    trainer = training.trainers["wide"]
    assert trainer.activation_scaler.scaling_factor == pytest.approx(scale, rel=1e-12)
    assert trainer.sae.b_dec.tolist() == pytest.approx((rows.mean(0) * scale).tolist(), rel=1e-6)


def test_heads_become_one_vector(tmp_path):
    heads = vectors(24).unflatten(-1, (3, 8))
    path = captured(tmp_path / "heads.stream", heads=heads)
    report = train(data_set(path, "heads"), tmp_path / "saes")
    (sae,) = load_saes(report.path).values()
    assert sae.cfg.d_in == 24
    with pytest.raises(InvalidArgumentError, match="takes vectors of 24"):
        reconstruction(sae)(torch.zeros(2, 5, 7))
    values = heads[0]
    assert torch.equal(reconstruction(sae)(values), sae(values.flatten(-2)).reshape(values.shape))


def test_a_provider_for_saelens_own_trainer(run):
    batches = activation_batches(data_set(run, batch_size=300, shuffle="none"), "wide")
    found = [next(batches) for _ in range(4)]  # 1,024 rows: 3 whole batches in an epoch
    rows = vectors(24).reshape(-1, 24)
    assert torch.equal(torch.cat(found[:3]), rows[:900])
    assert not torch.equal(found[3], rows[900:])
    with pytest.raises(InvalidArgumentError, match="no layer 'other': it has wide"):
        activation_batches(data_set(run), "other")


def test_the_callers_random_numbers_stay(run, tmp_path):
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    train(data_set(run), tmp_path / "saes")
    assert torch.equal(torch.rand(3), expected)


def test_losses_fall_and_can_be_drawn(run, tmp_path):
    report = train(data_set(run), tmp_path / "saes", steps=200)
    figure = plot_losses(report.path)
    (line,) = figure.axes[0].get_lines()
    losses = line.get_ydata()
    assert len(losses) == 200 and losses[-1] < losses[0] / 2
    assert report.losses["wide"] == pytest.approx(np.mean(losses[-20:]))
    with pytest.raises(NotFoundError, match="not finished"):
        plot_losses(tmp_path)


# ---- checkpoints ----------------------------------------------------------------------------


class Interrupted(Exception):
    pass


def interrupted(monkeypatch, after: int, function: Any) -> None:
    """Calls a function, and ends it with an exception after some saved checkpoints."""
    save, seen = SAETraining.save, []

    def saved(self: SAETraining, folder: Path) -> None:
        save(self, folder)
        seen.append(folder)
        if len(seen) == after:
            raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(SAETraining, "save", saved)
        with pytest.raises(Interrupted):
            function()


@pytest.mark.parametrize(
    ("architecture", "shuffle"),
    [*((name, "pool") for name in ARCHITECTURES), ("topk", "none"), ("topk", "full")],
)
def test_an_interrupted_training_ends_with_the_same_weights(
    run, tmp_path, monkeypatch, architecture, shuffle
):
    how = {
        "architecture": architecture, "options": OPTIONS.get(architecture, {}), "steps": 40,
        "checkpoint_every": 7,
        "trainer": {"lr_warm_up_steps": 20, "lr_decay_steps": 10, "dead_feature_window": 5,
                    "feature_sampling_window": 6},
    }  # fmt: skip

    def data() -> ActivationDataset:
        return data_set(
            run, ["wide", "narrow"], pool_rows=150, shuffle=shuffle, scratch=tmp_path / "rows"
        )

    whole = train(data(), tmp_path / "whole", **how)
    interrupted(monkeypatch, 3, lambda: train(data(), tmp_path / "parts", **how))
    assert [path.name for path in (tmp_path / "parts" / "_checkpoints").iterdir()] == ["00000021"]
    parts = train(data(), tmp_path / "parts", **how)
    assert parts.resumed_at == 21 and parts.losses == whole.losses
    for name in ("wide", "narrow"):
        for file in ("cfg.json", "sae_weights.safetensors"):
            one, two = (Path(report.saes[name]) / file for report in (whole, parts))
            assert one.read_bytes() == two.read_bytes()
    assert not (tmp_path / "parts" / "_checkpoints").exists()


def test_a_checkpoint_of_something_else_is_refused(run, tmp_path, monkeypatch):
    out, how = tmp_path / "saes", {"checkpoint_every": 5}
    interrupted(monkeypatch, 1, lambda: train(data_set(run), out, **how))
    with pytest.raises(StateError, match="its width is 32, that of this one 64"):
        train(data_set(run), out, width=64, **how)
    with pytest.raises(StateError, match="batch_size is 64, that of this one 32"):
        train(data_set(run, batch_size=32), out, **how)
    with pytest.raises(StateError, match="its layers is"):
        train(data_set(run, "narrow"), out, **how)
    with pytest.raises(NotFoundError, match="training is not finished"):
        load_saes(out)
    assert train(data_set(run), out, **how).resumed_at == 5


def test_a_damaged_checkpoint_says_so(run, tmp_path, monkeypatch):
    out, how = tmp_path / "saes", {"checkpoint_every": 5}
    interrupted(monkeypatch, 1, lambda: train(data_set(run), out, **how))
    state = out / "_checkpoints" / "00000005" / "state.pt"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(CorruptError, match="00000005 cannot be read"):
        train(data_set(run), out, **how)
    assert train(data_set(run), out, overwrite=True, **how).resumed_at == 0


def test_a_loss_that_is_not_finite_ends_the_training_and_names_the_step(tmp_path):
    values = vectors(24, steps=4)
    values[2, 3, 31, 5] = math.nan  # row 383, in the third batch of 128
    path = captured(tmp_path / "nan.stream", wide=values)
    data = data_set(path, batch_size=128, shuffle="none")
    out = tmp_path / "saes"
    how = {"normalize": "none", "bias": "zeros", "checkpoint_every": 2}
    with pytest.raises(NonFiniteLossError, match=r"'wide': the loss of training step 3 is nan"):
        train(data, out, **how)
    assert [path.name for path in (out / "_checkpoints").iterdir()] == ["00000002"]
    with pytest.raises(InvalidArgumentError, match="mean norm of its vectors is nan"):
        train(data_set(path), tmp_path / "other")


def test_a_finished_training_is_not_replaced_by_chance(run, tmp_path):
    out = tmp_path / "saes"
    train(data_set(run), out)
    with pytest.raises(InvalidArgumentError, match="has a finished training"):
        train(data_set(run), out)
    assert train(data_set(run), out, overwrite=True, steps=3).steps == 3
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    for overwrite in (False, True):
        with pytest.raises(InvalidArgumentError, match="is no training"):
            train(data_set(run), tmp_path / "mine", overwrite=overwrite)
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"


# ---- evaluation -----------------------------------------------------------------------------


def test_evaluation_is_that_of_the_formulas(run, tmp_path):
    report = train(data_set(run, ["wide", "narrow"]), tmp_path / "saes", steps=60)
    data = data_set(run, ["wide", "narrow"])
    before = data.state_dict()
    found = evaluate_sae(data, report.path)
    assert data.state_dict() == before
    for layer, rows in (("wide", vectors(24)), ("narrow", vectors(10, 1))):
        sae = load_saes(report.saes[layer])[layer]
        with torch.no_grad():
            features = sae.encode(rows.reshape(-1, rows.shape[-1]))
            out = sae.decode(features).numpy().astype(np.float64)
        x = rows.reshape(-1, rows.shape[-1]).numpy().astype(np.float64)
        error = ((x - out) ** 2).sum(1).mean()
        variance = ((x - x.mean(0)) ** 2).sum(1).mean()
        assert found[layer].explained_variance == pytest.approx(1 - error / variance, abs=1e-5)
        assert found[layer].fvu == pytest.approx(error / variance, abs=1e-5)
        assert found[layer].l0 == pytest.approx(np.count_nonzero(features) / len(x), abs=1e-5)
        assert found[layer].dead_features == int((features == 0).all(0).sum())
        assert found[layer].rows == len(x) and found[layer].features == FEATURES


def test_evaluation_of_some_rows(run, tmp_path):
    report = train(data_set(run), tmp_path / "saes")
    data = data_set(run, shuffle="none")
    found = evaluate_sae(data, load_saes(report.path), max_rows=100)["wide"]
    assert found.rows == 100
    sae = load_saes(report.path)["wide"]
    rows = vectors(24).reshape(-1, 24)[:100]
    error = (sae(rows) - rows).square().sum(1).mean()
    assert found.fvu == pytest.approx((error / rows.var(0, correction=0).sum()).item(), abs=1e-5)


def test_evaluation_names_what_does_not_fit(run, tmp_path):
    report = train(data_set(run), tmp_path / "saes")
    saes = load_saes(report.path)
    with pytest.raises(
        InvalidArgumentError, match="vectors of 10 values, its autoencoder takes 24"
    ):
        evaluate_sae(data_set(run, "narrow"), {"narrow": saes["wide"]})
    with pytest.raises(InvalidArgumentError, match="no layer 'wide': it has narrow"):
        evaluate_sae(data_set(run, "narrow"), report.path)
    with pytest.raises(NotFoundError, match="train some first"):
        evaluate_sae(data_set(run), tmp_path)
    path = captured(tmp_path / "same.stream", wide=torch.ones(1, 2, 32, 24))
    with pytest.raises(InvalidArgumentError, match="nothing can be explained"):
        evaluate_sae(data_set(path, batch_size=16), report.path)


class Tuples(nn.Module):
    """A language model with a block that returns a tuple, and one that returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, 24), nn.Linear(24, 50)
        self.pair, self.named = nn.Module(), nn.Module()
        self.pair.forward = lambda x: (x + 1, x.sum(-1))  # type: ignore[method-assign]
        self.named.forward = lambda x: {"other": x, "out": 2 * x}  # type: ignore[method-assign]
        self.unused = nn.Identity()
        self.noise = nn.Dropout()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        first, _ = self.pair(self.embed(input_ids))
        return self.head(self.noise(self.named(first)["out"]))


@pytest.fixture(scope="module")
def sae(run, tmp_path_factory) -> Any:
    report = train(data_set(run), tmp_path_factory.mktemp("sae") / "saes", steps=100)
    return load_saes(report.path)["wide"]


def language_model() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=24, n_layer=2, n_head=4, n_positions=64, bos_token_id=None,
        eos_token_id=None, initializer_range=0.5,  # so that each module matters
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("module", ["transformer.h.0", "transformer.h.1.attn", "transformer.wte"])
def test_the_score_is_that_of_the_formula(sae, module):
    model = language_model().train()
    ids = torch.randint(50, (3, 2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, 12:] = 0
    batches = [{"input_ids": one, "attention_mask": mask} for one in ids]
    found = cross_entropy_score(model, batches, sae, module)
    assert model.training and all(part.training for part in model.modules())

    model.eval()
    nats = {"original": [], "spliced": [], "ablated": []}
    for way, values in nats.items():
        with torch.no_grad():
            for one in ids:

                def hook(_, __, output, way=way):
                    tensor = output[0] if isinstance(output, tuple) else output
                    changed = {
                        "original": tensor, "spliced": sae(tensor), "ablated": 0 * tensor
                    }[way]  # fmt: skip
                    return (changed, *output[1:]) if isinstance(output, tuple) else changed

                handle = model.get_submodule(module).register_forward_hook(hook)
                logits = model(input_ids=one, attention_mask=mask).logits.double()
                handle.remove()
                log = torch.log_softmax(logits, -1)
                for text in range(2):
                    for at in range(1, int(mask[text].sum())):
                        values.append(-log[text, at - 1, one[text, at]].item())
    means = {way: np.mean(values) for way, values in nats.items()}
    assert found.tokens == len(nats["original"]) == 3 * (19 + 11)
    for way, mean in means.items():
        assert getattr(found, way) == pytest.approx(mean, abs=1e-5)
    score = (means["ablated"] - means["spliced"]) / (means["ablated"] - means["original"])
    assert found.score == pytest.approx(score, abs=1e-5)


def test_a_perfect_reconstruction_scores_one_and_zeros_score_zero():
    model, ids = language_model(), torch.arange(40).view(2, 20)

    class Exact:
        cfg, device, dtype = type("cfg", (), {"d_in": 24}), torch.device("cpu"), torch.float32

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.factor

        def modules(self) -> list[nn.Module]:
            return []

        def eval(self) -> None: ...

    for factor in (1.0, 0.0):
        exact = Exact()
        exact.factor = factor
        found = cross_entropy_score(model, [ids], exact, "transformer.h.0")
        assert found.score == pytest.approx(factor, abs=1e-6)


@pytest.mark.parametrize(
    ("module", "place"),
    [("pair", 0), ("pair[0]", 0), ("pair[1]", 1), ("named['out']", "out"), ("named[1]", "out")],
)
def test_one_tensor_of_several_is_replaced(module, place):
    model, x = Tuples(), torch.randn(2, 3, 24)
    part = model.get_submodule(module.partition("[")[0])
    before = part(x)
    with spliced(model, module, lambda values: values + 100):
        after = part(x)
    assert type(after) is type(before)
    for key in range(2) if isinstance(before, tuple) else before:
        assert torch.equal(after[key], before[key] + 100 * (key == place))
    assert torch.equal(part(x)[place], before[place])


def test_hooks_and_modes_are_as_before_after_an_error(sae):
    model = Tuples().train()
    model.noise.eval()
    modes = {name: part.training for name, part in model.named_modules()}
    wrong = torch.full((1, 4), 99)  # there are 50 tokens
    with pytest.raises(IndexError):
        cross_entropy_score(model, [wrong], sae, "pair")
    with pytest.raises(InvalidArgumentError, match="takes vectors of 24"):
        cross_entropy_score(model, [torch.ones(1, 4, dtype=torch.long)], sae, "head")
    assert all(not part._forward_hooks for part in model.modules())
    assert {name: part.training for name, part in model.named_modules()} == modes


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("pear", "no module 'pear': choose one of .*'pair'"),
        ("pair[2]", "returns no tensor at this place but tuple"),
        ("named['none']", "returns no tensor at this place but dict"),
        ("embed[0]", "returns no tensor at this place but Tensor"),
        ("pair[x]", "returns no tensor at this place but tuple"),
        ("unused", "'unused' did not run"),
    ],
)
def test_a_module_that_cannot_be_replaced_is_named(sae, module, message):
    with pytest.raises(InvalidArgumentError, match=message):
        cross_entropy_score(Tuples(), [torch.ones(1, 4, dtype=torch.long)], sae, module)


def test_texts_of_one_token_have_no_score(sae):
    with pytest.raises(InvalidArgumentError, match="no token to predict"):
        cross_entropy_score(Tuples(), [torch.ones(3, 1, dtype=torch.long)], sae, "pair")


# ---- the command ----------------------------------------------------------------------------


def strap(*arguments: Any) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["sae", *map(str, arguments)])
    return ended.value.code or 0


def test_the_command_trains_and_evaluates(run, tmp_path, capsys):
    out = tmp_path / "saes"
    train_it = [
        "train", run, out, "--layer", "w*", "--layer", "narrow", "--architecture", "topk",
        "--width", 32, "--option", "k=4", "--trainer", "lr_warm_up_steps=5", "--steps", 60,
        "--lr", 3e-3, "--batch-size", 64, "--shuffle", "none",
    ]  # fmt: skip
    assert strap(*train_it, "--figure", tmp_path / "loss.png", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report["saes"]) == {"wide", "narrow"} and report["steps"] == 60
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert strap(*train_it) == 2
    assert "has a finished training" in capsys.readouterr().err

    assert strap("evaluate", run, out, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    expected = evaluate_sae(data_set(run, ["wide", "narrow"]), out)
    for layer, one in found.items():
        assert one["explained_variance"] == pytest.approx(expected[layer].explained_variance)
        assert one["cross_entropy"] is None
    assert strap("evaluate", run, out, "--layer", "narrow", "--max-rows", 100) == 0
    heads, line = capsys.readouterr().out.splitlines()
    assert heads.split() == ["rows", "explained", "variance", "fvu", "l0", "dead", "layer"]
    assert line.split()[0] == "100" and line.split()[-1] == "narrow"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--layer", "wide", "--architecture", "none"], 2, "choose one of abstopk"),
        (["--architecture", "topk"], 2, "--layer: name at least one"),
        (["--layer", "wide", "--architecture", "topk", "--option", "k"], 2, "give a field as k=32"),
        (["--layer", "other", "--architecture", "topk"], 5, "no activation named 'other'"),
    ],
)
def test_the_command_names_what_is_wrong(run, tmp_path, capsys, arguments, code, message):
    sizes = ["--width", 32, "--batch-size", 64]
    assert strap("train", run, tmp_path / "saes", *sizes, *arguments) == code
    assert message in capsys.readouterr().err


def test_the_command_scores_a_language_model(tmp_path, capsys):
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{k}": k for k in range(50)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w0"
    ).save_pretrained(tmp_path / "model")
    model = language_model().eval()
    model.save_pretrained(tmp_path / "model")
    ids = torch.randint(50, (8, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), capture_activations(model, tmp_path / "run.stream", config=LOSSLESS):
        model(ids)
    layer = "transformer.h.0"
    train(data_set(tmp_path / "run.stream", layer), tmp_path / "saes")
    (tmp_path / "text.txt").write_text(" ".join(f"w{k}" for k in ids.flatten().tolist()))
    evaluate = ["evaluate", tmp_path / "run.stream", tmp_path / "saes", "--model"]
    evaluate += [tmp_path / "model", "--context", 40]
    assert strap(*evaluate, "--text", tmp_path / "text.txt", "--json") == 0
    found = json.loads(capsys.readouterr().out)[layer]["cross_entropy"]
    (sae,) = load_saes(tmp_path / "saes").values()
    expected = cross_entropy_score(model, ids[:, None], sae, layer)
    assert found["tokens"] == expected.tokens == 8 * 39
    assert found["score"] == pytest.approx(expected.score, abs=1e-5)
    assert strap(*evaluate) == 2
    assert "--model and --text: give both" in capsys.readouterr().err


# ---- errors ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"architecture": "sparse"}, "'sparse': choose one of abstopk, batchtopk"),
        ({"architecture": "transcoder"}, "'transcoder': choose one of"),
        ({"width": 0}, "width = 0"),
        ({"steps": 0}, "steps = 0"),
        ({"steps": 1.5}, "steps = 1.5"),
        ({"checkpoint_every": -1}, "checkpoint_every = -1"),
        ({"normalize": "layer_norm"}, "choose one of 'none', 'expected_average_only_in'"),
        ({"bias": "geometric_median"}, "choose one of 'mean', 'zeros'"),
        ({"options": {"q": 3}}, "options has no 'q': choose some of .*, k,"),
        ({"options": {"k": 33}}, "k = 33: choose a number from 1 to the width 32"),
        ({"options": {"d_in": 3}}, "options has no 'd_in'"),
        ({"trainer": {"optimizer": "sgd"}}, "trainer has no 'optimizer': choose some of .*lr_warm"),
        ({"architecture": "matryoshka_batchtopk", "options": {}}, "matryoshka_widths must not be"),
    ],
)
def test_an_argument_out_of_its_range_is_named(run, tmp_path, how, message):
    with pytest.raises(InvalidArgumentError, match=message):
        train(data_set(run), tmp_path / "saes", **how)
    assert not (tmp_path / "saes").exists()


def test_a_layer_without_a_vector_for_each_token_is_refused(tmp_path):
    path = captured(tmp_path / "pooled.stream", pooled=vectors(24))
    model = nn.Sequential(nn.Embedding(50, 24), nn.Flatten())
    with torch.no_grad(), capture_activations(model, path, config=LOSSLESS):
        model(torch.arange(10).view(2, 5))
    with pytest.raises(NotTokenAlignedError):
        data_set(path, "1")


def test_values_that_are_no_real_numbers_are_refused(tmp_path):
    path = captured(tmp_path / "ids.stream", ids=torch.arange(512).view(1, 4, 32, 4))
    with pytest.raises(UnsupportedError, match="'ids' has values of int64"):
        train(data_set(path, "ids"), tmp_path / "saes")


def test_fewer_rows_than_a_batch_are_refused(run, tmp_path):
    with pytest.raises(InvalidArgumentError, match="1,024 rows, fewer than its batch_size 5,000"):
        train(data_set(run, batch_size=5000, pool_rows=5000), tmp_path / "saes")


# ---- a dictionary that is known ---------------------------------------------------------------

WIDTH, PLANTED, ACTIVE, ROWS, BATCH, STEPS = 32, 32, 3, 8192, 256, 800


def planted() -> tuple[Tensor, Tensor]:
    """Unit features [features, width], and vectors [steps, 8, 256, width] of a few of them each."""
    random = torch.Generator().manual_seed(0)
    features = nn.functional.normalize(torch.randn(PLANTED, WIDTH, generator=random), dim=1)
    which = torch.rand(ROWS, PLANTED, generator=random).topk(ACTIVE).indices
    weights = torch.zeros(ROWS, PLANTED).scatter_(
        1, which, 1 + torch.rand(ROWS, ACTIVE, generator=random)
    )
    noise = 0.15 * torch.randn(ROWS, WIDTH, generator=random)
    return features, (weights @ features + noise).view(-1, 8, 256, WIDTH)


CODECS = {
    **{
        codec: InstrumentationConfig.max().with_float32().with_compression(codec)
        for codec in ("none", "lz4", "zstd")
    },
    "archive": InstrumentationConfig.balanced().with_archive(),
}
LEARNING: dict[str, Any] = {"lr_decay_steps": 260}


def fvu(sae: Any, rows: Tensor) -> float:
    with torch.no_grad():
        error = (sae(rows) - rows).square().sum(1).mean()
    return (error / rows.var(0, correction=0).sum()).item()


@pytest.fixture(scope="module")
def in_memory() -> float:
    """The FVU of SAELens' own trainer on the planted vectors in memory, in their order."""
    from sae_lens import SAETrainer, TopKTrainingSAE, TopKTrainingSAEConfig
    from sae_lens.config import SAETrainerConfig

    rows = planted()[1].view(-1, WIDTH)

    def batches():
        while True:
            yield from rows.split(BATCH)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sae = TopKTrainingSAE(
            TopKTrainingSAEConfig(
                d_in=WIDTH, d_sae=4 * PLANTED, k=ACTIVE,
                normalize_activations="expected_average_only_in",
            )
        )  # fmt: skip
        config = SAETrainerConfig(
            total_training_samples=STEPS * BATCH, train_batch_size_samples=BATCH, lr=5e-3,
            lr_end=5e-4, n_batches_for_norm_estimate=ROWS // BATCH, **LEARNING,
        )  # fmt: skip
        return fvu(SAETrainer(config, sae, batches()).fit(), rows)


@pytest.mark.parametrize("codec", CODECS)
def test_a_planted_dictionary_is_found(tmp_path, in_memory, codec):
    features, values = planted()
    name = "layer.archive" if codec == "archive" else "layer.stream"
    path = captured(tmp_path / name, CODECS[codec], layer=values)
    data = data_set(path, "layer", batch_size=BATCH, shuffle="none")
    report = train(
        data, tmp_path / "saes", width=4 * PLANTED, steps=STEPS, options={"k": ACTIVE}, lr=5e-3,
        trainer=LEARNING, bias="zeros",  # as SAELens begins
    )  # fmt: skip
    (sae,) = load_saes(report.path).values()
    learned = nn.functional.normalize(sae.W_dec.detach(), dim=1)
    assert (features @ learned.T).max(1).values.mean() >= 0.9
    assert evaluate_sae(data, report.path)["layer"].fvu == pytest.approx(in_memory, rel=0.02)
    assert fvu(sae, values.view(-1, WIDTH)) == pytest.approx(in_memory, rel=0.02)
