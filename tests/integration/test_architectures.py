"""A capture holds the tensors that plain hooks see, in widely used architectures."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers as hf
from llm_instrumentation import ActivationReader, CaptureStats, capture_activations
from llm_instrumentation.core.recording import opened
from torch import Tensor, nn
from transformers.models.mamba.modeling_mamba import MambaMixer

NEW = 3  # tokens to generate
LAYERS = 2
SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
TWO_STACKS = {
    "d_model": 32, "encoder_layers": LAYERS, "decoder_layers": LAYERS,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48, "decoder_start_token_id": 2,
}  # fmt: skip
IMAGES = {"image_size": 16, "patch_size": 8}
GROUPED = {"num_key_value_heads": 2}
SMALL_HEADS = {**GROUPED, "head_dim": 8}

TEXT = {"input_ids": torch.randint(1, 96, (2, 9), generator=torch.Generator().manual_seed(1))}
TEXT_PAIR = {**TEXT, "decoder_input_ids": TEXT["input_ids"][:, :4]}
IMAGE = {"pixel_values": torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(2))}
SOUND = {"input_values": torch.randn(1, 800, generator=torch.Generator().manual_seed(3))}
SPECTRUM = {"input_features": torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(4))}

# Mamba's kernels, and their replacement in PyTorch, read the weights of these modules and do not
# call them. Older transformers have a slow path beside the kernels, which calls these modules.
MAMBA: tuple[str, ...] = ()
if not hasattr(MambaMixer, "slow_forward"):
    MAMBA = tuple(f"backbone.layers.#.mixer.{part}" for part in ("conv1d", "act", "dt_proj"))


class Case(NamedTuple):
    """A class of transformers, its sizes, its inputs, and the modules that it never calls.

    In the names of these ``silent`` modules # stands for the number of each layer. ``told`` says
    that a capture warns of them: the model computes their outputs without calling them, so the
    capture misses these outputs.
    """

    model: str
    sizes: dict[str, Any] = {}  # noqa: RUF012
    inputs: dict[str, Tensor] = TEXT
    silent: tuple[str, ...] = ()
    told: bool = False

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        made = getattr(hf, self.model)
        return made(made.config_class(**{**SIZES, **self.sizes})).eval()


DECODERS = {
    "gpt2": Case("GPT2LMHeadModel", {"n_embd": 32, "n_layer": LAYERS, "n_head": 4},
                 silent=("transformer.h.#.attn.attn_dropout",)),
    "gpt-neox": Case("GPTNeoXForCausalLM"),
    "opt": Case("OPTForCausalLM", {"ffn_dim": 48, "word_embed_proj_dim": 32}, silent=("model",)),
    "bloom": Case("BloomForCausalLM"),
    "falcon": Case("FalconForCausalLM",
                   silent=("transformer.h.#.self_attention.attention_dropout",)),
    "llama": Case("LlamaForCausalLM"),
    "llama-tied": Case("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": Case("MistralForCausalLM", GROUPED),
    "mixtral": Case("MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "qwen2": Case("Qwen2ForCausalLM", GROUPED),
    "qwen3": Case("Qwen3ForCausalLM", SMALL_HEADS),
    "qwen3-moe": Case("Qwen3MoeForCausalLM", {**SMALL_HEADS, "num_experts": 4,
                      "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "gemma2": Case("Gemma2ForCausalLM", SMALL_HEADS),
    "gemma3": Case("Gemma3ForCausalLM", SMALL_HEADS),
    "phi3": Case("Phi3ForCausalLM", GROUPED),
    "olmo": Case("OlmoForCausalLM"),
    "gpt-oss": Case("GptOssForCausalLM", {**SMALL_HEADS, "num_local_experts": 4}),
    "mamba": Case("MambaForCausalLM", silent=MAMBA, told=bool(MAMBA)),
    "rwkv": Case("RwkvForCausalLM"),
}  # fmt: skip
TRANSLATORS = {
    "t5": Case("T5ForConditionalGeneration", {"d_model": 32, "d_kv": 8, "d_ff": 48,
               "num_layers": LAYERS, "num_heads": 4, "decoder_start_token_id": 0}, TEXT_PAIR,
               silent=("shared",)),
    "bart": Case("BartForConditionalGeneration", {**TWO_STACKS, "forced_eos_token_id": None},
                 TEXT_PAIR, silent=("model.shared",)),
    "whisper": Case("WhisperForConditionalGeneration", {**TWO_STACKS, "num_mel_bins": 8,
                    "max_source_positions": 20, "max_target_positions": 20},
                    {**SPECTRUM, "decoder_input_ids": TEXT["input_ids"][:1, :4]}),
}  # fmt: skip
ENCODERS = {
    "bert": Case("BertForMaskedLM", silent=("bert.encoder.layer.#.attention.self.dropout",)),
    "roberta": Case("RobertaForMaskedLM",
                    silent=("roberta.encoder.layer.#.attention.self.dropout",)),
    "distilbert": Case("DistilBertModel", {"dim": 32, "hidden_dim": 48, "n_layers": LAYERS,
                       "n_heads": 4}, silent=("transformer.layer.#.attention.dropout",)),
    "deberta-v2": Case("DebertaV2Model"),
    "albert": Case("AlbertModel", {"embedding_size": 16}, silent=(
                   "encoder.albert_layer_groups.0.albert_layers.0.attention.attention_dropout",
                   "encoder.albert_layer_groups.0.albert_layers.0.dropout")),
    "electra": Case("ElectraModel", {"embedding_size": 16},
                    silent=("encoder.layer.#.attention.self.dropout",)),
    "vit": Case("ViTModel", IMAGES, IMAGE),
    "clip": Case("CLIPModel", {"text_config": {**SIZES, "eos_token_id": 2},
                 "vision_config": {**SIZES, **IMAGES}, "projection_dim": 16}, {**TEXT, **IMAGE}),
    "resnet": Case("ResNetModel", {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
                   IMAGE, silent=("encoder.stages.#.layers",)),
    "wav2vec2": Case("Wav2Vec2Model", {"conv_dim": (8, 8), "conv_stride": (5, 2),
                     "conv_kernel": (10, 3), "num_conv_pos_embeddings": 4,
                     "num_conv_pos_embedding_groups": 2}, SOUND),
}  # fmt: skip
CASES = {**DECODERS, **TRANSLATORS, **ENCODERS}


def modules(*patterns: str) -> set[str]:
    """The names of modules, in which # was replaced by the number of each layer."""
    return {name.replace("#", str(layer)) for name in patterns for layer in range(LAYERS)}


@contextlib.contextmanager
def captures(model: nn.Module, path: Path, told: bool = False) -> Iterator[Any]:
    """A capture in which no output fails. If ``told``, it warns of the modules that it misses."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with contextlib.ExitStack() as stack:
            if told:
                stack.enter_context(pytest.warns(RuntimeWarning, match="nothing is captured of"))
            yield stack.enter_context(capture_activations(model, path))


def check_steps(path: Path, stats: CaptureStats, expected: int) -> None:
    """Checks that every packet belongs to a step, and that there are ``expected`` steps."""
    with ActivationReader(path) as reader:
        assert None not in {activation.step for activation in reader}
        assert reader.steps == tuple(range(expected))
        assert not reader.missing
    assert (stats.steps, stats.failed, stats.dropped) == (expected, 0, 0)


@pytest.mark.parametrize("kind", ["hooks in C", "hooks in Python"])
@pytest.mark.parametrize("name", CASES)
def test_a_forward_pass(name, kind, path, watching, assert_captured, monkeypatch):
    """A capture has every output, with hooks in C and in Python."""
    case = CASES[name]
    if kind == "hooks in Python":
        monkeypatch.setattr(opened, "view_function", lambda _: 0)
    model = case.build()
    with torch.no_grad(), watching(model) as seen:
        with captures(model, path, case.told) as framework:
            model(**case.inputs)
    assert_captured(path, seen)
    check_steps(path, framework.stats(), 1)
    assert set(framework.stats().silent) == modules(*case.silent)


@pytest.mark.parametrize("name", [*DECODERS, *TRANSLATORS])
def test_a_generation(name, path, watching, assert_captured):
    """A captured generation gives the same tokens, and each forward call is a step."""
    case = CASES[name]
    model = case.build()
    inputs = {key: value for key, value in case.inputs.items() if key != "decoder_input_ids"}
    asked = {**inputs, "max_new_tokens": NEW, "do_sample": False}
    alone = model.generate(**asked)
    with watching(model) as seen, captures(model, path, case.told) as framework:
        assert torch.equal(model.generate(**asked), alone)
    assert_captured(path, seen)
    # generate() calls the encoder separately, before the first token.
    check_steps(path, framework.stats(), NEW + (name in TRANSLATORS))
    assert set(framework.stats().silent) == modules(*case.silent)


@pytest.mark.parametrize(
    "asked",
    [
        {"num_beams": 3},
        {"num_beams": 2, "do_sample": True},
        {"do_sample": True, "top_k": 20},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"assistant_model": "gpt2"},
        {"prompt_lookup_num_tokens": 2},
    ],
    ids=" ".join,
)
def test_ways_to_generate(asked, path, watching, assert_captured):
    """Beams, samples, caches and assistants give the same tokens with a capture as without."""
    model = CASES["llama"].build()
    inputs = {"input_ids": TEXT["input_ids"][:1]}
    asked = {**inputs, "max_new_tokens": 2 * NEW, "do_sample": False, **asked}
    if "assistant_model" in asked:  # a second model, which is not captured
        asked["assistant_model"] = CASES["gpt2"].build()
    torch.manual_seed(5)
    alone = model.generate(**asked)
    torch.manual_seed(5)
    with watching(model) as seen, captures(model, path) as framework:
        assert torch.equal(model.generate(**asked), alone)
    assert_captured(path, seen)
    calls = sum(name == "['logits']" for name, _ in seen)
    assert 2 <= calls <= 2 * NEW  # each right guess of the assistant saves a call
    check_steps(path, framework.stats(), calls)
    assert framework.stats().silent == ()


def gradients(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor | None]:
    hf.set_seed(5)  # for the dropouts, and for the masks that numpy draws for wav2vec2
    for _ in range(2):  # the second pass adds to the gradients of the first
        output = model(**inputs)
        (output.logits if "logits" in output else output[0]).square().mean().backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert any(gradient is not None and gradient.any() for gradient in found)
    return found


def lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1,
        init_lora_weights=False,
    )  # fmt: skip
    torch.manual_seed(1)
    return get_peft_model(model, config)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "lora", "t5", "bart", "vit", "wav2vec2"])
def test_training(name, path, watching, assert_captured):
    """The gradients are the same as without a capture, bit for bit."""
    case = CASES["llama" if name == "lora" else name]

    def made() -> nn.Module:
        return (lora(case.build()) if name == "lora" else case.build()).train()

    alone = gradients(made(), case.inputs)
    model = made()
    with watching(model) as seen, captures(model, path) as framework:
        captured = gradients(model, case.inputs)
    for one, other in zip(alone, captured, strict=True):
        assert one is other or torch.equal(one, other)  # both None where the weights are frozen
    assert_captured(path, seen)
    check_steps(path, framework.stats(), 2)


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_gradient_checkpointing(name, reentrant, path, watching, same):
    """Outputs that a backward pass computes again are captured as `!recomputed`, without a step."""
    model = CASES[name].build().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with watching(model) as seen, captures(model, path) as framework:
        logits = model(**TEXT).logits
        forward = len(seen)
        logits.square().mean().backward()
    assert len(seen) > forward
    with ActivationReader(path) as reader:
        assert len(reader) == len(seen)
        for number, (activation, (name, tensor)) in enumerate(zip(reader, seen, strict=True)):
            again = number >= forward
            assert activation.name == name + "!recomputed" * again
            assert activation.step == (None if again else 0)
            assert same(activation.to_torch(exact=False), tensor.half())
        assert reader.steps == (0,)
    assert framework.stats().steps == 1


def test_an_lstm(path, watching, assert_captured):
    """All tensors of an LSTM's nested outputs are captured, also for a packed sequence."""
    torch.manual_seed(0)
    model = nn.LSTM(6, 8, num_layers=2, bidirectional=True)
    x = torch.randn(3, 2, 6)
    with torch.no_grad(), watching(model) as seen, captures(model, path) as framework:
        model(x)
        model(nn.utils.rnn.pack_padded_sequence(x, [3, 2]))
    assert_captured(path, seen)
    assert [name for name, _ in seen[:4]] == ["", "[1][0]", "[1][1]", "[0][0]"]
    check_steps(path, framework.stats(), 2)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_torchs_transformer_encoder(training, path, watching, assert_captured):
    """In eval mode PyTorch runs the encoder as one fused operator, unless it has hooks.

    With hooks it calls its modules.
    """
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).train(training)
    x = torch.randn(2, 3, 16)
    mask = torch.tensor([[False, False, False], [False, False, True]])
    with torch.no_grad(), watching(model) as seen, captures(model, path) as framework:
        model(x, src_key_padding_mask=mask)
    assert_captured(path, seen)
    check_steps(path, framework.stats(), 1)
    assert set(framework.stats().silent) == modules("layers.#.self_attn.out_proj")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.ao.quantization")
@pytest.mark.parametrize("name", ["bert", "lstm"])
def test_a_dynamically_quantised_model(name, path, watching, assert_captured):
    """Modules that hold packed weights are never called. They have no outputs to miss."""
    if name == "lstm":
        model, inputs = nn.Sequential(nn.LSTM(6, 8)), {"input": torch.randn(3, 2, 6)}
    else:
        model, inputs = CASES[name].build(), TEXT
    model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear, nn.LSTM})
    with torch.no_grad(), watching(model) as seen, captures(model, path) as framework:
        model(**inputs)
    assert_captured(path, seen)
    check_steps(path, framework.stats(), 1)
    expected = set()
    if name == "bert":
        expected = modules(*CASES["bert"].silent) | {
            name for name, _ in model.named_modules() if name.endswith("._packed_params")
        }
        assert len(expected) == LAYERS * 7 + 2  # a dropout and six layers each, and the head
    assert set(framework.stats().silent) == expected


@pytest.mark.parametrize("adapters", ["on", "off", "merged"])
def test_low_rank_adapters(adapters, path, watching, assert_captured):
    """LoRA adapters are captured while they are in use; unused ones are `silent`."""
    model = lora(CASES["llama"].build()).eval()
    if adapters == "merged":
        model.merge_adapter()
    asked = {**TEXT, "max_new_tokens": NEW, "do_sample": False}
    with contextlib.ExitStack() as stack:
        if adapters == "off":
            stack.enter_context(model.disable_adapter())
        alone = model.generate(**asked)
        with watching(model) as seen, captures(model, path) as framework:
            assert torch.equal(model.generate(**asked), alone)
    assert_captured(path, seen)
    check_steps(path, framework.stats(), NEW)
    # generate() does not call the two wrappers.
    expected = {"", "base_model"}
    if adapters != "on":
        expected |= modules(
            *(
                f"base_model.model.model.layers.#.self_attn.{projection}_proj.lora_{part}.default"
                for projection in "qv"
                for part in ("A", "B", "dropout")
            )
        )
    assert set(framework.stats().silent) == expected


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "t5", "bart"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_an_offloaded_model(place, name, path, tmp_path, watching, assert_captured):
    """accelerate loads the weights of each module only while the module runs."""
    from accelerate import cpu_offload, disk_offload

    case = CASES[name]
    model = case.build()
    with torch.no_grad():
        expected = model(**case.inputs).logits
        if place == "cpu":
            cpu_offload(model, torch.device("cpu"))
        else:
            disk_offload(model, tmp_path / "weights", torch.device("cpu"))
        assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
        # Offloaded weights are no longer tied, but the model still lists the tied names.
        with watching(model) as seen, captures(model, path) as framework:
            assert torch.equal(model(**case.inputs).logits, expected)
    assert_captured(path, seen)
    check_steps(path, framework.stats(), 1)
    assert set(framework.stats().silent) == modules(*case.silent)


def test_a_layer_that_stands_for_several(path):
    """ALBERT calls its one layer several times in a step. The calls are counted from 0."""
    model = CASES["albert"].build()
    with torch.no_grad(), captures(model, path):
        output = model(**TEXT)
    with ActivationReader(path) as reader:
        layer = reader["encoder.albert_layer_groups.0.albert_layers.0"]
        assert [(one.step, one.call) for one in layer] == [(0, 0), (0, 1)]
        assert torch.equal(layer[1].to_torch(), output.last_hidden_state.half())
