"""How units write to the residual stream, against what the stream gains in a run of the model."""

from __future__ import annotations

import pytest
import torch
from llm_instrumentation.errors import UnsupportedError
from llm_instrumentation.interventions.unit_writes import written_by
from small_models import build
from tiny_models import make
from torch import Tensor, nn

KNOWN = {
    "gpt2": ("transformer.h.1.mlp.act", "transformer.h.1.mlp.c_proj!input"),
    "llama": ("model.layers.1.mlp.down_proj!input", "model.layers.1.self_attn.o_proj!input"),
    "opt": ("model.decoder.layers.1.fc2!input", "model.decoder.layers.1.activation_fn"),
    "gpt_neox": ("gpt_neox.layers.1.mlp.act", "gpt_neox.layers.1.attention.dense!input"),
}
NOT_KNOWN = {
    "gpt2": ("transformer.h.1.mlp.c_fc", "transformer.h.1.ln_2", "transformer.wte", "nothing"),
    "llama": ("model.layers.1.mlp.act_fn", "model.layers.1.mlp.gate_proj",
              "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.o_proj!output"),
    # A norm stands behind the blocks.
    "gemma2": ("model.layers.1.mlp.down_proj!input", "model.layers.1.self_attn.o_proj!input",
               "model.layers.1.mlp", "model.layers.1.self_attn.o_proj"),
}  # fmt: skip


def cases(table: dict[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(kind, layer) for kind, layers in table.items() for layer in layers]


@pytest.mark.parametrize(("kind", "layer"), cases(KNOWN))
def test_a_unit_adds_its_column_to_the_residual_stream(kind, layer):
    """One unit is raised by 1. What the block returns gains the column of the unit."""
    model = make(kind).model.double()
    writes = written_by(model, layer)
    assert writes is not None
    weight = writes.weight.T if type(writes).__name__ == "Conv1D" else writes.weight
    ids = torch.tensor([[5, 9, 2]])
    added: list[Tensor] = []
    kept = writes.register_forward_hook(lambda module, args, output: added.append(output.clone()))

    def raised(value: Tensor) -> Tensor:
        changed = value.clone()
        changed.reshape(-1, changed.shape[-1])[-1, 3] += 1
        return changed

    module = dict(model.named_modules())[layer.removesuffix("!input")]
    with torch.no_grad():
        model(input_ids=ids)
        if layer.endswith("!input"):
            edit = module.register_forward_pre_hook(lambda module, args: (raised(args[0]),))
        else:
            edit = module.register_forward_hook(lambda module, args, output: raised(output))
        model(input_ids=ids)
    edit.remove()
    kept.remove()
    plain, changed = (one.reshape(-1, one.shape[-1])[-1] for one in added)
    assert torch.allclose(changed - plain, weight[:, 3])


@pytest.mark.parametrize(("kind", "layer"), cases(NOT_KNOWN))
def test_units_that_meet_something_else_first_are_refused(kind, layer):
    with pytest.raises(UnsupportedError, match="how the units of"):
        written_by(make(kind).model, layer)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [("gpt2", "transformer.h.1"), ("llama", "model.layers.1.mlp"),
     ("llama", "model.layers.1['hidden_states']!input"),
     ("llama", "model.layers.1.self_attn.o_proj"),
     ("gemma2", "model.layers.1.post_feedforward_layernorm")],
)  # fmt: skip
def test_units_of_the_residual_stream_write_themselves(kind, layer):
    assert written_by(make(kind).model, layer) is None


def test_another_model_is_refused():
    with pytest.raises(UnsupportedError):
        written_by(nn.Sequential(nn.Linear(4, 4)), "0")


def test_the_model_is_left_as_it_was():
    model = build("gpt2")
    written_by(model, "transformer.h.0.mlp.act")
    assert not any(module._forward_hooks for module in model.modules())
