"""Finds modules that a capture should have seen run, and did not."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

__all__ = ["unaccounted"]


def unaccounted(
    model: nn.Module, modules: Sequence[tuple[str, nn.Module]], ran: Sequence[int]
) -> list[str]:
    """The names of hooked modules that did not run although their parent did.

    If a module did not run, the modules inside it are not listed. Modules that need not run are
    left out too:

    - dropouts, which fused attention does not call
    - parts whose weights a ``nn.MultiheadAttention`` or a quantised layer uses
    - experts that got no token
    - layers dropped in training and adapters that are off: modules of the same class in the same
      container ran, or the parent is a module of peft
    - modules whose weights belong to another module that ran
    - modules inside which others ran

    Args:
        model: the model that has the modules. A model of transformers names its tied weights;
            accelerate replaces them by others when it offloads them.
        modules: the hooked modules with their names.
        ran: for each module, whether it ran.
    """
    of = {name: (module, bool(seen)) for (name, module), seen in zip(modules, ran, strict=True)}
    alive: set[str] = {""}  # names of the modules that ran, and of their parents
    tied = getattr(getattr(model, "_orig_mod", model), "all_tied_weights_keys", None)
    ties: dict[str, str] = tied if isinstance(tied, dict) else {}  # no dict before transformers 5
    used: set[int | str] = set()  # the weights of the modules that ran
    for name, (module, seen) in of.items():
        if seen:
            for weights in _weights(name, module, ties):
                used |= weights
            while name not in alive:
                alive.add(name)
                name = name.rpartition(".")[0]
    # Which kinds of modules ran in each container.
    kinds = {(name.rpartition(".")[0], type(m)) for name, (m, seen) in of.items() if seen}
    found = []
    for name, (module, _) in of.items():
        above = container = name.rpartition(".")[0]
        while above and above not in of:
            above = above.rpartition(".")[0]
        parent, parent_ran = of.get(above, (None, True))
        if not (
            name in alive
            or not parent_ran
            or isinstance(module, _DropoutNd)
            or isinstance(parent, nn.MultiheadAttention)
            or "quantized" in type(parent).__module__.split(".")
            or type(parent).__module__.startswith("peft.")
            or (container not in of and (container, type(module)) in kinds)
            or "experts" in name.split(".")
            or any(weights and weights <= used for weights in _weights(name, module, ties))
        ):
            found.append(name)
    return found


def _weights(
    name: str, module: nn.Module, ties: dict[str, str]
) -> tuple[set[int | str], set[int | str]]:
    """A module's own weights: their ids, and their names. A tied weight has its source's name."""
    own = {f"{name}.{key}": weight for key, weight in module.named_parameters(recurse=False)}
    return {id(weight) for weight in own.values()}, {ties.get(key, key) for key in own}
