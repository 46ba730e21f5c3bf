from __future__ import annotations

from types import SimpleNamespace

import pytest
import transformers
from llm_instrumentation.core.auto_detect import create_optimized_config, detect_model_architecture
from llm_instrumentation.core.config import InstrumentationConfig
from torch import nn


def test_the_model_type_of_a_transformers_model():
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=8)
    assert detect_model_architecture(transformers.GPT2Model(config)) == "gpt2"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SimpleNamespace(model_type="MiXed"), "mixed"),
        (SimpleNamespace(architectures=["LlamaForCausalLM"]), "llama"),
        (SimpleNamespace(model_type="", architectures=["Qwen2ForCausalLM"]), "qwen"),
        (SimpleNamespace(model_type=None, architectures=None), "unknown"),
        (SimpleNamespace(architectures=[]), "unknown"),
        (None, "unknown"),
    ],
)
def test_the_config_names_the_model_type(config, expected):
    model = nn.Linear(1, 1)
    model.config = config
    assert detect_model_architecture(model) == expected


def test_the_class_name_is_the_last_resort():
    """A model whose config names no type is recognised by the name of its class."""

    class TinyBertEncoder(nn.Module):
        pass

    assert detect_model_architecture(TinyBertEncoder()) == "bert"
    assert detect_model_architecture(nn.Linear(1, 1)) == "unknown"


@pytest.mark.parametrize(
    ("architecture", "purpose", "expected"),
    [
        ("gpt", "interpretability", InstrumentationConfig.attention_analysis()),
        ("gpt", "debugging", InstrumentationConfig.fast_capture()),
        ("bert", "performance_analysis", InstrumentationConfig.balanced()),
        ("t5", "performance_analysis", InstrumentationConfig.balanced()),
        ("gpt", "full_capture", InstrumentationConfig.balanced()),
        ("gpt", "anything else", InstrumentationConfig.balanced()),
        *[
            (
                architecture,
                "performance_analysis",
                InstrumentationConfig.balanced().with_compression("zstd").with_memory_limit(16),
            )
            for architecture in (
                "gpt",
                "llama",
                "qwen",
                "gpt2",
                "gpt_neox",
                "gptj",
                "gpt_oss",
                "llama4",
                "mistral",
                "mixtral",
                "qwen2",
                "qwen3",
                "qwen3_moe",
            )
        ],
    ],
)
def test_a_configuration_for_a_purpose(architecture, purpose, expected):
    assert create_optimized_config(architecture, purpose) == expected
