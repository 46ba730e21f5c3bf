"""The modules that each granularity selects, on real architectures with random weights."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from llm_instrumentation.core.config import HookConfig, HookGranularity, InstrumentationConfig
from llm_instrumentation.core.selection import LayerSelectionError, select_modules
from torch import nn

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


def bert():
    return transformers.BertModel(transformers.BertConfig(**SIZES))


def gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def mixtral():
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1
    )
    return transformers.MixtralForCausalLM(config)


def opt():
    config = transformers.OPTConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        ffn_dim=32,
        max_position_embeddings=32,
        word_embed_proj_dim=16,
    )
    return transformers.OPTForCausalLM(config)


def t5():
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    return transformers.T5EncoderModel(config)


def gpt_neox():
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES))


def falcon():
    config = transformers.FalconConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.FalconForCausalLM(config)


def qwen3():
    if not hasattr(transformers, "Qwen3Config"):
        pytest.skip("this transformers has no Qwen3")
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8)
    )


def qwen2_moe():
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        num_key_value_heads=2,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )
    return transformers.Qwen2MoeForCausalLM(config)


def names(model, config, **options):
    return [name for name, _ in select_modules(model, config, **options)]


def below(block, *children):
    """The name of a block and of the given modules inside it."""
    return [block, *(f"{block}.{child}" for child in children)]


LLAMA_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")

ATTENTION = {
    bert: [
        *below("encoder.layer.0.attention"),
        *below("encoder.layer.0.attention.self", "query", "key", "value", "dropout"),
        *below("encoder.layer.0.attention.output", "dense", "LayerNorm", "dropout"),
    ],
    gpt2: below("transformer.h.0.attn", "c_attn", "c_proj", "attn_dropout", "resid_dropout"),
    llama: below("model.layers.0.self_attn", *LLAMA_ATTENTION),
    mixtral: below("model.layers.0.self_attn", *LLAMA_ATTENTION),
    opt: below("model.decoder.layers.0.self_attn", "k_proj", "v_proj", "q_proj", "out_proj"),
    t5: [
        *below("encoder.block.0.layer.0"),
        *below("encoder.block.0.layer.0.SelfAttention", "q", "k", "v", "o"),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        "encoder.block.0.layer.0.layer_norm",
        "encoder.block.0.layer.0.dropout",
    ],
    gpt_neox: below("gpt_neox.layers.0.attention", "query_key_value", "dense"),
    falcon: below(
        "transformer.h.0.self_attention", "query_key_value", "dense", "attention_dropout"
    ),
    qwen3: below("model.layers.0.self_attn", *LLAMA_ATTENTION, "q_norm", "k_norm"),
    qwen2_moe: below("model.layers.0.self_attn", *LLAMA_ATTENTION),
}

LLAMA_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")

MLP = {
    bert: [
        *below("encoder.layer.0.intermediate", "dense", "intermediate_act_fn"),
        *below("encoder.layer.0.output", "dense", "LayerNorm", "dropout"),
    ],
    gpt2: below("transformer.h.0.mlp", "c_fc", "c_proj", "act", "dropout"),
    llama: below("model.layers.0.mlp", *LLAMA_MLP),
    mixtral: below("model.layers.0.mlp", "gate", "experts", "experts.act_fn"),
    opt: [f"model.decoder.layers.0.{part}" for part in ("activation_fn", "fc1", "fc2")],
    t5: [
        *below("encoder.block.0.layer.1"),
        *below("encoder.block.0.layer.1.DenseReluDense", "wi", "wo", "dropout", "act"),
        "encoder.block.0.layer.1.layer_norm",
        "encoder.block.0.layer.1.dropout",
    ],
    gpt_neox: below("gpt_neox.layers.0.mlp", "dense_h_to_4h", "dense_4h_to_h", "act"),
    falcon: below("transformer.h.0.mlp", "dense_h_to_4h", "act", "dense_4h_to_h"),
    qwen3: below("model.layers.0.mlp", *LLAMA_MLP),
    qwen2_moe: [
        *below("model.layers.0.mlp", "gate", "experts", "experts.act_fn"),
        *below("model.layers.0.mlp.shared_expert", *LLAMA_MLP),
        "model.layers.0.mlp.shared_expert_gate",
    ],
}


def expected_attention(build, model):
    """ATTENTION in the order of the model's modules, with those that older transformers have."""
    block = ATTENTION[build][0]
    modules = [name for name, _ in model.named_modules()]
    older = {f"{block}.{part}" for part in ("rotary_emb", "attention_dropout")}
    expected = older.intersection(modules).union(ATTENTION[build])
    assert expected <= set(modules)
    return [name for name in modules if name in expected]


@pytest.mark.parametrize("build", ATTENTION, ids=lambda build: build.__name__)
def test_attention_only_is_the_attention_block_and_its_modules(build):
    model = build()
    found = names(model, InstrumentationConfig.attention_analysis())
    assert found == expected_attention(build, model)


@pytest.mark.parametrize("build", MLP, ids=lambda build: build.__name__)
def test_mlp_only_is_the_feed_forward_block_and_its_modules(build):
    model = build()
    if any(isinstance(module, nn.ModuleList) for name, module in model.named_modules()
           if name.endswith("experts")):  # fmt: skip
        pytest.skip("this transformers has a module for each expert")
    assert names(model, InstrumentationConfig.mlp_analysis()) == MLP[build]


@pytest.mark.parametrize("build", ATTENTION, ids=lambda build: build.__name__)
def test_full_tensor_takes_every_module_that_can_have_an_output(build):
    model = build()
    expected = [n for n, m in model.named_modules() if not isinstance(m, nn.ModuleList)]
    assert expected[0] == ""
    assert names(model, InstrumentationConfig.balanced()) == expected


def test_every_module_that_runs_is_taken():
    model, ran = llama().eval(), set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.add(name))
    model(torch.zeros(1, 4, dtype=torch.long))
    assert ran <= set(names(model, InstrumentationConfig.balanced()))


def test_torch_modules_are_known_too():
    layer = nn.TransformerEncoderLayer(16, 2)
    assert names(layer, InstrumentationConfig.attention_analysis()) == [
        "self_attn",
        "self_attn.out_proj",
    ]


def test_cross_attention_is_attention():
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    model = transformers.T5ForConditionalGeneration(config)
    attention = names(model, InstrumentationConfig.attention_analysis())
    assert "decoder.block.0.layer.1.EncDecAttention.q" in attention
    assert not any("DenseReluDense" in name for name in attention)


@pytest.mark.parametrize(
    ("name", "granularity"),
    [
        ("crossattention", HookGranularity.ATTENTION_ONLY),
        ("encoder_attn", HookGranularity.ATTENTION_ONLY),
        ("attn2", HookGranularity.ATTENTION_ONLY),
        ("block_sparse_moe", HookGranularity.MLP_ONLY),
        ("feed_forward", HookGranularity.MLP_ONLY),
        ("ffn", HookGranularity.MLP_ONLY),
    ],
)
def test_blocks_are_known_by_name(name, granularity):
    names_that_only_resemble_blocks = (
        "post_attention_layernorm",
        "attention_norm",
        "post_mlp_dropout",
        "pre_ffn_norm",
        "staff",
    )
    model = nn.ModuleDict({n: nn.Identity() for n in (*names_that_only_resemble_blocks, name)})
    assert names(model, HookConfig(granularity)) == [name]


def test_a_shared_module_appears_once_under_its_first_name():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    assert names(model, InstrumentationConfig.balanced()) == ["", "0", "1"]


def test_a_compiled_model_has_the_names_of_the_original():
    model = llama()
    original = names(model, InstrumentationConfig.balanced())
    model.model.layers[0].self_attn = torch.compile(model.model.layers[0].self_attn)
    compiled = torch.compile(model)
    assert names(compiled, InstrumentationConfig.balanced()) == original
    found = names(compiled, InstrumentationConfig.attention_analysis())
    assert found == expected_attention(llama, llama())
    # The hooks are on the original modules, which the compiled ones call.
    selected = dict(select_modules(compiled, InstrumentationConfig.balanced()))
    assert selected[""] is model
    assert selected["model.layers.0.self_attn"] is model.model.layers[0].self_attn._orig_mod


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("*.c_fc", None, ["transformer.h.0.mlp.c_fc"]),
        (re.compile(r"ln_\d$"), None, ["transformer.h.0.ln_1", "transformer.h.0.ln_2"]),
        (nn.Embedding, None, ["transformer.wte", "transformer.wpe"]),
        (["*.wte", nn.LayerNorm], re.compile("ln_[12]"), ["transformer.wte", "transformer.ln_f"]),
        ("*.h.0.mlp*", "*.dropout", below("transformer.h.0.mlp", "c_fc", "c_proj", "act")),
    ],
)
def test_patterns_narrow_the_choice(include, exclude, expected):
    config = InstrumentationConfig.balanced().with_layers(include=include, exclude=exclude)
    assert names(gpt2(), config) == expected


def test_patterns_and_granularity_both_apply():
    config = InstrumentationConfig.attention_analysis().with_layers(include="*_proj")
    assert names(gpt2(), config) == ["transformer.h.0.attn.c_proj"]


def test_target_layers_are_exact_names_and_override_the_granularity():
    config = HookConfig(HookGranularity.MLP_ONLY, target_layers=["lm_head", "model.norm"])
    assert names(llama(), config) == ["model.norm", "lm_head"]
    assert names(llama(), InstrumentationConfig.mlp_analysis(), target_layers=[""]) == [""]


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (InstrumentationConfig.attention_analysis(), "attention_only"),
        (InstrumentationConfig.balanced().with_layers(include="*.mlp"), "'*.mlp'"),
        (InstrumentationConfig.balanced().with_layers(exclude=nn.Module), "Module"),
        (HookConfig(HookGranularity.FULL_TENSOR, target_layers=["0", "nope"]), "'nope'"),
        (HookConfig(HookGranularity.FULL_TENSOR, target_layers=[]), "no layer at all"),
    ],
)
def test_the_error_of_an_empty_choice_names_the_request_and_the_layers(config, named):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(LayerSelectionError) as caught:
        select_modules(model, config)
    assert named in str(caught.value)
    assert "it has '', '0', '1'" in str(caught.value)


def test_a_container_cannot_be_a_target():
    with pytest.raises(LayerSelectionError, match=r"'model\.layers'"):
        select_modules(llama(), InstrumentationConfig.balanced(), target_layers=["model.layers"])


def test_a_shared_module_is_selected_by_each_of_its_names():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"first": shared, "second": nn.Sequential(shared, nn.ReLU())})
    balanced = InstrumentationConfig.balanced
    assert names(model, balanced().with_layers("second.0")) == ["first"]
    assert names(model, balanced().with_layers(exclude="second.0")) == ["second", "second.1"]
    assert [name for name, _ in select_modules(model, balanced(), ["second.0"])] == ["first"]
