"""What the name and the class of a module tell of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

__all__ = [
    "CROSS_ATTENTION",
    "Item",
    "adapter_advice",
    "has_forward",
    "is_attention",
    "leaf_of",
    "mlp_test",
    "modules_by_name",
    "original_name",
    "parent_of",
    "parents_of",
    "uncompiled",
]

Item = tuple[str, nn.Module]

CROSS_ATTENTION = re.compile(
    r"encoder_?attn|cross_?attention|cross_?attn|encdecattention|multihead_attn|^x_attn"
    r"|encoder_decoder_attention|inter_attention",
    re.IGNORECASE,
)
"""Found in the names of attention blocks that read keys and values of another text."""

# Attention blocks are recognised by the last part of their name (`attn`, `self_attn`, `attention`,
# `SelfAttention`, `attn1`) or by their class (`LlamaAttention`, `BertSdpaSelfAttention`,
# `LlamaFlashAttention2`, `MultiheadAttention`).
_ATTENTION_NAME = re.compile(r"(attn|attention)\d*$", re.IGNORECASE)
_ATTENTION_CLASS = re.compile(r"(Attn|Attention)\d*$")

# Feed-forward blocks are recognised by their name (`mlp`, `feed_forward`, `ffn`,
# `block_sparse_moe`, `shared_expert`) or by their class (`LlamaMLP`, `T5LayerFF`,
# `T5DenseActDense`, `MixtralSparseMoeBlock`, `Qwen2MoeExperts`).
_MLP_NAME = re.compile(r"(^|_)(mlp|ffn?|feed_?forward|moe|experts?)\d*$", re.IGNORECASE)
_MLP_CLASS = re.compile(
    r"(MLP|Mlp|FFN?|FeedForward|MoE|MOE|Moe|Experts?|Dense(Gated)?ActDense)"
    r"(Block|Layer|Network|Net)?\d*$"
)

# Some layers have no feed-forward block of their own but hold its parts beside the attention:
# BERT and ViT as `intermediate` and `output`, OPT and BART as `fc1` and `fc2`.
_MLP_PARTS: tuple[tuple[frozenset[str], frozenset[str]], ...] = (
    (frozenset({"intermediate", "output"}), frozenset({"intermediate", "output"})),
    (
        frozenset({"fc1", "fc2"}),
        frozenset({"fc1", "fc2", "activation_fn", "activation_dropout"}),
    ),
)


def adapter_advice(model: nn.Module) -> str:
    """The end of a message about parts of a model that are not found; "" without adapters of PEFT.

    PEFT wraps the model and some of its modules, so names and classes are other ones.
    """
    if not any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules()):
        return ""
    return ". The model has adapters of PEFT: merge them first, with merge_and_unload()"


def original_name(name: str) -> str:
    """A module's name in the model, without the parts that ``torch.compile`` adds."""
    if "_orig_mod" not in name:
        return name
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """All modules of a model by their names without the parts that ``torch.compile`` adds."""
    return {original_name(raw): module for raw, module in model.named_modules()}


def has_forward(module: nn.Module) -> bool:
    """Whether a module has an output, unlike containers such as ``nn.ModuleList``."""
    if isinstance(module, torch.jit.ScriptModule):
        return bool(module._c._has_method("forward"))
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def is_attention(name: str, module: nn.Module) -> bool:
    """Whether a module is an attention block, by its name and class."""
    return bool(
        _ATTENTION_NAME.search(leaf_of(name)) or _ATTENTION_CLASS.search(_class_name(module))
    )


def mlp_test(modules: Sequence[Item]) -> Callable[[str, nn.Module], bool]:
    """Returns a test whether one of these modules is a feed-forward block, or a part of one."""
    parts: set[str] = set()
    children: dict[str, set[str]] = {}
    for name, _ in modules:
        if name:
            children.setdefault(parent_of(name), set()).add(leaf_of(name))
    for name, leaves in children.items():
        for together, members in _MLP_PARTS:
            if together <= leaves:
                prefix = f"{name}." if name else ""
                parts.update(prefix + leaf for leaf in leaves & members)

    def is_mlp(name: str, module: nn.Module) -> bool:
        return (
            name in parts
            or bool(_MLP_NAME.search(leaf_of(name)))
            or bool(_MLP_CLASS.search(_class_name(module)))
        )

    return is_mlp


def leaf_of(name: str) -> str:
    """The last part of a module's name."""
    return name.rpartition(".")[2]


def parent_of(name: str) -> str:
    """The name of the module that holds a module."""
    return name.rpartition(".")[0]


def _class_name(module: nn.Module) -> str:
    return type(uncompiled(module)).__name__


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that a compiled one calls; else the module itself."""
    # Those of a script are in a class of its own, without `get`.
    found = dict(module._modules.items()).get("_orig_mod")
    return module if found is None else found


def parents_of(name: str) -> Iterable[str]:
    """The names of the modules around a module, from the model, which is "", inwards."""
    if not name:
        return
    yield ""
    for i, character in enumerate(name):
        if character == ".":
            yield name[:i]
