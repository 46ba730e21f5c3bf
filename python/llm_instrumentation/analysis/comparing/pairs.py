"""Finds the tensors of two captures that belong together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import InvalidArgumentError
from ..reader import ActivationReader, ActivationView, UnknownActivationError

__all__ = ["LayerPairs", "match_layers", "pair"]

Rows = npt.NDArray[np.int64]


class LayerPairs(NamedTuple):
    """The tensors of a layer that two captures have.

    Attributes:
        a, b: places in the views of the layer, in the order of the first capture.
        only_a, only_b: how many tensors have no partner.
    """

    a: Rows
    b: Rows
    only_a: int
    only_b: int


def match_layers(
    a: ActivationReader,
    b: ActivationReader,
    layers: str | Iterable[str] | None,
    rename: Mapping[str, str],
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Finds what the layers of one capture are called in another, which may lack them.

    Args:
        a, b: the captures.
        layers: names or patterns of layers of `a`; None: all.
        rename: for names or patterns of `a`, the name in `b`; the first that fits counts. Each `*`
            of the name takes the text that the `*` of the pattern stands for.

    Returns:
        the names in `b` by the names in `a`, in the order of `a`; and the layers of `b` that are
        not among them, if `layers` is None.

    Raises:
        UnknownActivationError: a pattern fits no layer of `a`.
        InvalidArgumentError: pattern and name have different numbers of `*`; or two layers of `a`
            become one of `b`.
    """
    rules = [_rule(a, pattern, name) for pattern, name in rename.items()]
    patterns = [layers] if isinstance(layers, str) else layers
    wanted = set(a.layers)
    if patterns is not None:
        wanted = {name for pattern in patterns for name in a._fitting(pattern)}
    names: dict[str, str] = {}
    sources: dict[str, str] = {}
    for name in a.layers:
        if name not in wanted:
            continue
        target = next((new for rule in rules if (new := _renamed(name, *rule)) is not None), name)
        if (other := sources.setdefault(target, name)) != name:
            raise InvalidArgumentError(
                f"{other!r} and {name!r} are both compared with {target!r} of {b.path}: rename "
                "one of them, or choose layers"
            )
        names[name] = target
    others = () if patterns is not None else tuple(n for n in b.layers if n not in sources)
    return names, others


def _rule(a: ActivationReader, pattern: str, name: str) -> tuple[re.Pattern[str], list[str]]:
    if pattern.count("*") != name.count("*"):
        raise InvalidArgumentError(
            f"{pattern!r} becomes {name!r}: both need the same number of *, for the parts that stay"
        )
    glob = re.compile(re.escape(pattern).replace(r"\*", "(.*?)"), re.DOTALL)
    if not any(glob.fullmatch(layer) for layer in a.layers):
        raise UnknownActivationError(a._unknown(pattern, a.layers))
    return glob, name.split("*")


def _renamed(layer: str, glob: re.Pattern[str], parts: list[str]) -> str | None:
    if (found := glob.fullmatch(layer)) is None:
        return None
    return parts[0] + "".join(map("".join, zip(found.groups(), parts[1:], strict=True)))


def pair(a: ActivationView, b: ActivationView) -> LayerPairs:
    """Pairs the tensors of a layer by request, step and call, and then by their order.

    Without steps, as in captures of llm_instrumentation 1.3.1, only by their order.
    """
    requests: dict[str, int] = {}
    by = () if _without_steps(a) or _without_steps(b) else ("step", "call")
    keys_a, keys_b = (_keys(view, by, requests) for view in (a, b))
    _, at_a, at_b = np.intersect1d(keys_a, keys_b, assume_unique=True, return_indices=True)
    order = np.argsort(at_a)
    return LayerPairs(at_a[order], at_b[order], len(a) - len(at_a), len(b) - len(at_b))


def _without_steps(view: ActivationView) -> bool:
    return bool((view._column("step") < 0).any())


def _keys(
    view: ActivationView, by: tuple[str, ...], requests: dict[str, int]
) -> npt.NDArray[np.void]:
    """A distinct key for each tensor: its request, step and call, and its number among equals."""
    codes, names = view._snapshot.catalogue.texts("request")
    numbers = np.array([requests.setdefault(name, len(requests)) for name in names] + [-1])
    columns = [numbers[codes[view._rows]], *(view._column(name) for name in by)]
    order = np.lexsort(columns[::-1])  # stable, so equals stay in the order of capture
    begins = np.ones(len(view), np.bool_)
    begins[1:] = np.logical_or.reduce([c[order][1:] != c[order][:-1] for c in columns])
    places = np.arange(len(view))
    nth = np.empty(len(view), np.int64)
    nth[order] = places - np.maximum.accumulate(np.where(begins, places, 0))
    return np.rec.fromarrays([column.astype(np.int64) for column in [*columns, nth]])
