"""Selects the modules of a model that a capture hooks."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from ..errors import InvalidArgumentError
from .config import HookConfig, HookGranularity, InstrumentationConfig, LayerPattern
from .tensors.model_sites import sites_of_model
from .tensors.modules import (
    Item,
    has_forward,
    is_attention,
    mlp_test,
    original_name,
    parents_of,
    uncompiled,
)

__all__ = ["LayerSelectionError", "select_modules"]

_NAMES_SHOWN = 8


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
    `intermediate` and the layer's own `output`. `config.include`, `config.sites` and
    `config.exclude` then narrow the selection.

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
        selected = _blocks(modules, is_attention)
    elif config.granularity is HookGranularity.MLP_ONLY:
        selected = _blocks(modules, mlp_test(modules))
    asked = f"granularity {config.granularity.value}"
    if isinstance(config, InstrumentationConfig):
        if config.include or config.sites:
            sites = _names_of_sites(model, config)
            selected = [
                item
                for item in selected
                if not sites.isdisjoint(names[id(item[1])]) or _matches(item, names, config.include)
            ]
            asked += f", include {_show_patterns(config.include)}" if config.include else ""
            asked += f", sites {sorted(sites)}" if sites else ""
        if config.exclude:
            selected = [item for item in selected if not _matches(item, names, config.exclude)]
            asked += f", exclude {_show_patterns(config.exclude)}"
    if not selected:
        raise LayerSelectionError(
            f"no module of {type(model).__name__} matches {asked}; {_available(modules)}"
        )
    return selected


def _names_of_sites(model: nn.Module, config: InstrumentationConfig) -> set[str]:
    """The names of the modules that `config.sites` chooses."""
    if not config.sites:
        return set()
    sites = sites_of_model(model)
    try:
        found = [sites.find(kind, layers, stack=stack) for kind, layers, stack in config.sites]
    except InvalidArgumentError as error:
        raise LayerSelectionError(f"{type(model).__name__}: {error}") from error
    return {name for names in found for name in names}


_Names = dict[int, list[str]]  # by the id of the module


def _callable_modules(model: nn.Module) -> list[Item]:
    modules: dict[str, nn.Module] = {}
    for raw_name, module in model.named_modules():
        name = original_name(raw_name)
        if has_forward(module) and (name not in modules or uncompiled(modules[name]) is module):
            modules[name] = module
    return list(modules.items())


def _all_names(model: nn.Module) -> _Names:
    """All names of each module; a shared one has several."""
    names: _Names = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(original_name(name))
    return names


def _by_exact_name(modules: list[Item], names: _Names, target_layers: Sequence[str]) -> list[Item]:
    wanted = {original_name(name): name for name in target_layers}
    selected = [item for item in modules if not wanted.keys().isdisjoint(names[id(item[1])])]
    missing = wanted.keys() - {name for _, module in selected for name in names[id(module)]}
    if missing or not selected:
        asked = ", ".join(repr(wanted[name]) for name in sorted(missing)) or "no layer at all"
        raise LayerSelectionError(f"target_layers names {asked}; {_available(modules)}")
    return selected


def _blocks(modules: list[Item], is_block: Callable[[str, nn.Module], bool]) -> list[Item]:
    """The blocks and everything inside them; parents come before their children."""
    inside: set[str] = set()
    selected = []
    for name, module in modules:
        if is_block(name, module) or any(parent in inside for parent in parents_of(name)):
            inside.add(name)
            selected.append((name, module))
    return selected


def _matches(item: Item, names: _Names, patterns: Iterable[LayerPattern]) -> bool:
    module = item[1]
    own = names[id(module)]
    for pattern in patterns:
        if isinstance(pattern, str):
            matched = any(fnmatch.fnmatchcase(name, pattern) for name in own)
        elif isinstance(pattern, re.Pattern):
            matched = any(pattern.search(name) is not None for name in own)
        else:
            matched = isinstance(uncompiled(module), pattern)
        if matched:
            return True
    return False


def _show_patterns(patterns: Iterable[LayerPattern]) -> str:
    def show(pattern: LayerPattern) -> str:
        if isinstance(pattern, type):
            return pattern.__name__
        return repr(pattern.pattern if isinstance(pattern, re.Pattern) else pattern)

    return "[" + ", ".join(map(show, patterns)) + "]"


def _available(modules: list[Item]) -> str:
    if not modules:
        return "the model has no module with a forward"
    # Names are taken at even distances, so a large model shows more than its first layer.
    step = max(1, len(modules) // _NAMES_SHOWN)
    shown = [repr(name) for name, _ in modules[::step][:_NAMES_SHOWN]]
    more = len(modules) - len(shown)
    return "it has " + ", ".join(shown) + (f" and {more} more" if more > 0 else "")
