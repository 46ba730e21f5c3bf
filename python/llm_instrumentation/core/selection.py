"""Selects the modules of a model that a capture hooks."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from .config import HookConfig, HookGranularity, InstrumentationConfig, LayerPattern

__all__ = ["LayerSelectionError", "select_modules"]

_NAMES_SHOWN = 8

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


class LayerSelectionError(ValueError):
    """No module of the model is selected; the message shows the request and the module names."""


def select_modules(
    model: nn.Module,
    config: InstrumentationConfig | HookConfig,
    target_layers: Sequence[str] | None = None,
) -> list[tuple[str, nn.Module]]:
    """The modules to hook, as (name, module) in the order of `model.named_modules()`.

    The root's name is "". A shared module has its first name and can be selected by any of its
    names. The `_orig_mod.` that `torch.compile` inserts is stripped. A compiled module and its
    original then have the same name; the original is selected, because the compiled one calls it.
    Containers without a forward of their own, such as `nn.ModuleList`, have no output and are left
    out.

    FULL_TENSOR and SAMPLED_SLICES select every module. ATTENTION_ONLY selects the attention blocks,
    and MLP_ONLY the feed-forward and mixture-of-experts blocks, each with everything inside it.
    Blocks are recognised by module name and class name. In a BERT layer the attention block is
    `attention` (with `attention.self` and `attention.output`), and the feed-forward block is
    `intermediate` and the layer's own `output`. The patterns `config.include` and `config.exclude`
    then narrow the selection.

    Args:
        model: the model, compiled or not.
        config: granularity and, in an `InstrumentationConfig`, patterns; a `HookConfig` has
            `target_layers` instead.
        target_layers: exact names; if given, only these are selected.

    Raises:
        LayerSelectionError: no module is selected, or a name in `target_layers` is not a module
            with a forward.
    """
    if target_layers is None and isinstance(config, HookConfig):
        target_layers = config.target_layers
    modules, names = _callable_modules(model), _all_names(model)
    if target_layers is not None:
        return _by_exact_name(modules, names, target_layers)

    selected = modules
    if config.granularity is HookGranularity.ATTENTION_ONLY:
        selected = _blocks(modules, _is_attention)
    elif config.granularity is HookGranularity.MLP_ONLY:
        selected = _blocks(modules, _mlp_test(modules))
    asked = f"granularity {config.granularity.value}"
    if isinstance(config, InstrumentationConfig):
        if config.include:
            selected = [item for item in selected if _matches(item, names, config.include)]
            asked += f", include {_show_patterns(config.include)}"
        if config.exclude:
            selected = [item for item in selected if not _matches(item, names, config.exclude)]
            asked += f", exclude {_show_patterns(config.exclude)}"
    if not selected:
        raise LayerSelectionError(
            f"no module of {type(model).__name__} matches {asked}; {_available(modules)}"
        )
    return selected


_Item = tuple[str, nn.Module]
_Names = dict[int, list[str]]  # by the id of the module


def _callable_modules(model: nn.Module) -> list[_Item]:
    modules: dict[str, nn.Module] = {}
    for raw_name, module in model.named_modules():
        name = original_name(raw_name)
        if has_forward(module) and (name not in modules or _original(modules[name]) is module):
            modules[name] = module
    return list(modules.items())


def _all_names(model: nn.Module) -> _Names:
    """All names of each module; a shared one has several."""
    names: _Names = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(original_name(name))
    return names


def adapter_advice(model: nn.Module) -> str:
    """The end of a message about parts of a model that are not found; "" without adapters of PEFT.

    PEFT wraps the model and some of its modules, so names and classes are other ones.
    """
    if not any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules()):
        return ""
    return ". The model has adapters of PEFT: merge them first, with merge_and_unload()"


def original_name(name: str) -> str:
    """A module's name in the model, without the parts that ``torch.compile`` adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def has_forward(module: nn.Module) -> bool:
    """Whether a module has an output, unlike containers such as ``nn.ModuleList``."""
    if isinstance(module, torch.jit.ScriptModule):
        return bool(module._c._has_method("forward"))
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _by_exact_name(
    modules: list[_Item], names: _Names, target_layers: Sequence[str]
) -> list[_Item]:
    wanted = {original_name(name): name for name in target_layers}
    selected = [item for item in modules if not wanted.keys().isdisjoint(names[id(item[1])])]
    missing = wanted.keys() - {name for _, module in selected for name in names[id(module)]}
    if missing or not selected:
        asked = ", ".join(repr(wanted[name]) for name in sorted(missing)) or "no layer at all"
        raise LayerSelectionError(f"target_layers names {asked}; {_available(modules)}")
    return selected


def _blocks(modules: list[_Item], is_block: Callable[[str, nn.Module], bool]) -> list[_Item]:
    """The blocks and everything inside them; parents come before their children."""
    inside: set[str] = set()
    selected = []
    for name, module in modules:
        if is_block(name, module) or any(parent in inside for parent in _parents(name)):
            inside.add(name)
            selected.append((name, module))
    return selected


def _parents(name: str) -> Iterable[str]:
    if not name:
        return
    yield ""
    for i, character in enumerate(name):
        if character == ".":
            yield name[:i]


def _is_attention(name: str, module: nn.Module) -> bool:
    return bool(_ATTENTION_NAME.search(_leaf(name)) or _ATTENTION_CLASS.search(_class_name(module)))


def _mlp_test(modules: list[_Item]) -> Callable[[str, nn.Module], bool]:
    parts: set[str] = set()
    children: dict[str, set[str]] = {}
    for name, _ in modules:
        if name:
            children.setdefault(_parent(name), set()).add(_leaf(name))
    for parent, leaves in children.items():
        for together, members in _MLP_PARTS:
            if together <= leaves:
                prefix = parent + "." if parent else ""
                parts.update(prefix + leaf for leaf in leaves & members)

    def is_mlp(name: str, module: nn.Module) -> bool:
        return (
            name in parts
            or bool(_MLP_NAME.search(_leaf(name)))
            or bool(_MLP_CLASS.search(_class_name(module)))
        )

    return is_mlp


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _class_name(module: nn.Module) -> str:
    return type(_original(module)).__name__


def _original(module: nn.Module) -> nn.Module:
    original = module._modules.get("_orig_mod")
    return module if original is None else original


def _matches(item: _Item, names: _Names, patterns: Iterable[LayerPattern]) -> bool:
    module = item[1]
    own = names[id(module)]
    for pattern in patterns:
        if isinstance(pattern, str):
            matched = any(fnmatch.fnmatchcase(name, pattern) for name in own)
        elif isinstance(pattern, re.Pattern):
            matched = any(pattern.search(name) is not None for name in own)
        else:
            matched = isinstance(_original(module), pattern)
        if matched:
            return True
    return False


def _show_patterns(patterns: Iterable[LayerPattern]) -> str:
    def show(pattern: LayerPattern) -> str:
        if isinstance(pattern, type):
            return pattern.__name__
        return repr(pattern.pattern if isinstance(pattern, re.Pattern) else pattern)

    return "[" + ", ".join(map(show, patterns)) + "]"


def _available(modules: list[_Item]) -> str:
    if not modules:
        return "the model has no module with a forward"
    # Names are taken at even distances, so a large model shows more than its first layer.
    step = max(1, len(modules) // _NAMES_SHOWN)
    shown = [repr(name) for name, _ in modules[::step][:_NAMES_SHOWN]]
    more = len(modules) - len(shown)
    return "it has " + ", ".join(shown) + (f" and {more} more" if more > 0 else "")
