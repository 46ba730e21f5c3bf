"""Finds the tensors in a module's output, names each by its place, and replaces one."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, MutableMapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgumentError, UnsupportedError

__all__ = ["replace_tensor", "split_name", "walk_output"]

_MAX_DEPTH = 64
_CACHE_KEYS = frozenset({"past_key_values", "past_key_value", "cache_params"})


def walk_output(
    output: Any, *, kv_cache: bool, unwalked: set[str] | None = None
) -> Iterable[tuple[str, Tensor]]:
    """The tensors in `output` with their paths; module name + path is the packet's name.

    A tensor, and element 0 of a tuple or list if it is a tensor, has the path "". Every other
    tensor has the path that leads to it: `[1]` in tuples (named ones too) and lists, `['logits']`
    in mappings and transformers' ModelOutput, `.field` in dataclasses, joined if nested:
    `['hidden_states'][2]`. Paths are unique within an output. Nested, sparse and quantized tensors
    are given as they are. Other values (None, numbers, strings) are skipped, and so is a container
    that contains itself.

    Key-value caches (transformers' `Cache` and similar classes, and legacy tuples under the key
    `past_key_values`) are left out unless `kv_cache`; then each layer's tensors have paths such as
    `['cache'][0].keys` and `['cache'][0].values` (before transformers 5.24 the key is
    `past_key_values`). A bare tuple of keys and
    values, which old models return inside a tuple, looks like other tensors and is always walked.

    Args:
        output: the return value of the module's forward.
        kv_cache: whether to walk key-value caches.
        unwalked: receives the names of types that hold tensors but cannot be walked, so the caller
            can report them.
    """
    if isinstance(output, Tensor):
        return (("", output),)
    traced = torch.compiler.is_compiling()
    if not traced and (found := _flat(output, kv_cache)) is not None:
        return found
    walk = (_TracedWalk if traced else _Walk)(kv_cache, unwalked)
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        walk.found.append(("", output[0]))
        walk.enter(output, lambda: walk.sequence("", output, first=1))
    else:
        walk.visit("", output)
    return walk.found


def _flat(output: Any, kv_cache: bool) -> list[tuple[str, Tensor]] | None:
    """A faster walk for tuples and dicts (transformers' ModelOutput too) of tensors and None.

    Returns:
        the tensors with their paths; None: the output is of another kind.
    """
    found = []
    if type(output) is tuple:
        for i, value in enumerate(output):
            if isinstance(value, Tensor):
                found.append((f"[{i}]" if i else "", value))
            elif value is not None:
                return None
    elif isinstance(output, dict) and _kind(type(output)) is _Walk.mapping:
        for position, (key, value) in enumerate(output.items()):
            if value is None or (key in _CACHE_KEYS and not kv_cache):
                continue
            if not isinstance(value, Tensor):
                return None
            found.append((f"[{_key(key, position)}]", value))
    else:
        return None
    return found


class _Walk:
    def __init__(self, kv_cache: bool, unwalked: set[str] | None) -> None:
        self.kv_cache = kv_cache
        self.unwalked = unwalked
        self.found: list[tuple[str, Tensor]] = []
        self._open: set[int] = set()  # ids of the containers that are being walked

    def visit(self, path: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.found.append((path, value))
            return
        kind = _kind(type(value))
        if kind is not None:
            self.enter(value, lambda: kind(self, path, value))

    def enter(self, container: Any, walk: Callable[[], None]) -> None:
        identity = id(container)
        if identity in self._open:
            return
        if len(self._open) >= _MAX_DEPTH:
            self.report(f"{_type_name(type(container))} nested deeper than {_MAX_DEPTH}")
            return
        self._open.add(identity)
        walk()
        self._open.remove(identity)

    def report(self, name: str) -> None:
        if self.unwalked is not None:
            self.unwalked.add(name)

    def sequence(self, path: str, values: Any, first: int = 0) -> None:
        for i in range(first, len(values)):
            self.visit(f"{path}[{i}]", values[i])

    def mapping(self, path: str, values: Mapping[Any, Any]) -> None:
        for position, (key, value) in enumerate(values.items()):
            if key in _CACHE_KEYS and not self.kv_cache:
                continue
            self.visit(f"{path}[{_key(key, position)}]", value)

    def dataclass(self, path: str, value: Any) -> None:
        for field in dataclasses.fields(value):
            if field.name in _CACHE_KEYS and not self.kv_cache:
                continue
            self.visit(f"{path}.{field.name}", getattr(value, field.name, None))

    def cache(self, path: str, cache: Any) -> None:
        if not self.kv_cache:
            return
        if hasattr(cache, "self_attention_cache") and hasattr(cache, "cross_attention_cache"):
            self.visit(f"{path}.self_attention_cache", cache.self_attention_cache)
            self.visit(f"{path}.cross_attention_cache", cache.cross_attention_cache)
        elif isinstance(getattr(cache, "layers", None), list):
            for i, layer in enumerate(cache.layers):
                self.attributes(f"{path}[{i}]", layer)
        elif hasattr(cache, "key_cache") and hasattr(cache, "value_cache"):
            # Older transformers keep the tensors of all layers in two lists.
            for i, keys in enumerate(cache.key_cache):
                self.visit(f"{path}[{i}].keys", keys)
            for i, values in enumerate(cache.value_cache):
                self.visit(f"{path}[{i}].values", values)
        else:
            self.attributes(path, cache)

    def attributes(self, path: str, value: Any) -> None:
        for name, held in _attributes(value):
            if isinstance(held, (Tensor, tuple, list, Mapping)):
                self.visit(f"{path}.{name}", held)

    def unknown(self, path: str, value: Any) -> None:
        name = _type_name(type(value))
        if self.unwalked is None or name in self.unwalked:
            return
        if isinstance(value, Iterator) or _holds_tensor(value, depth=3):
            self.report(name)


class _TracedWalk(_Walk):
    """A walk that torch.compile traces.

    Code that looked at the ids of containers would be compiled anew for each of them.
    """

    def visit(self, path: str, value: Any) -> None:
        if isinstance(value, Tensor):
            self.found.append((path, value))
        elif (kind := _kind_name(type(value))) is not None:
            getattr(self, kind)(path, value)

    def enter(self, container: Any, walk: Callable[[], None]) -> None:
        walk()


_Kind = Callable[[_Walk, str, Any], None]
_KINDS: dict[type, _Kind | None] = {}  # memo of _classify; None: the type holds no tensors


def _kind(cls: type) -> _Kind | None:
    try:
        return _KINDS[cls]
    except KeyError:
        kind = _KINDS[cls] = _classify(cls)
        return kind


def _kind_name(cls: type) -> str | None:
    """The name of the method that walks the values of a class; None: they hold no tensors."""
    kind = _kind(cls)
    return None if kind is None else kind.__name__


# torch.compile calls the function while it traces, and takes its result for a constant.
vars(_kind_name)["_dynamo_marked_constant"] = True

_LEAVES = (type(None), bool, int, float, complex, str, bytes, Enum, type)
_TORCH_LEAVES = (torch.Size, torch.dtype, torch.device, torch.Generator)


def _classify(cls: type) -> _Kind | None:
    if issubclass(cls, (*_LEAVES, *_TORCH_LEAVES)):
        return None
    if any(_is_cache_class(base) for base in cls.__mro__):
        return _Walk.cache
    if issubclass(cls, (tuple, list)):
        return _Walk.sequence
    if issubclass(cls, Mapping):
        return _Walk.mapping
    if dataclasses.is_dataclass(cls):
        return _Walk.dataclass
    if any(base.__name__.endswith("Cache") for base in cls.__mro__):
        return _Walk.cache  # opaque caches of single models, such as xLSTMCache
    return _Walk.unknown


def _is_cache_class(cls: type) -> bool:
    return cls.__name__ == "Cache" or cls.__module__ == "transformers.cache_utils"


def _key(key: Any, position: int) -> str:
    if isinstance(key, (str, int, float, bytes, Enum)) or key is None:
        return repr(key)
    return f"#{position}"  # other keys may print an address, which differs from run to run


def _type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, _LEAVES):
        return False
    if isinstance(value, Mapping):
        held: Iterable[Any] = list(value.values())
    elif isinstance(value, (tuple, list, set, frozenset)):
        held = value
    else:
        held = [item for _, item in _attributes(value)]
    return any(_holds_tensor(item, depth - 1) for item in held)


# ---- one tensor by its name -------------------------------------------------------------------


def split_name(name: str, modules: Container[str]) -> tuple[str, str] | None:
    """Splits the name of a tensor, "h.0[1]", into the name of its module and its path.

    Args:
        name: a name as in captures.
        modules: the names of the model's modules. A name of a module may contain brackets.

    Returns:
        module and path; None: there is no such module.
    """
    ends = [len(name), *(i for i in reversed(range(len(name))) if name[i] == "[")]
    return next(((name[:end], name[end:]) for end in ends if name[:end] in modules), None)


def replace_tensor(
    output: Any,
    path: str,
    change: Callable[[str, Tensor], Tensor],
    *,
    of: str,
    verb: str = "returns",
) -> Any:
    """A copy of a module's output in which one tensor is replaced.

    The containers that lead to the tensor are copied, with their types. All else is shared.

    Args:
        output: as for `walk_output`.
        path: where the tensor is, as `walk_output` names it. "" is also the first value of a
            mapping, `[1]` also its second one, and `['field']` also a field of a dataclass.
        change: receives the path that `walk_output` gives the tensor, and the tensor. If it returns
            the same tensor, the result is `output`.
        of: the name of the module, for messages.
        verb: what the module does with `output`, for messages.

    Raises:
        InvalidArgumentError: there is no tensor at this place; the message lists the places.
        UnsupportedError: the tensor is in a key-value cache.
    """
    wanted = path
    if not path and not isinstance(output, Tensor):
        wanted = next((names[0] for _, names, _ in _children(output)), path)
    first = "[0]" if isinstance(output, (tuple, list)) else None

    def named(found: str, tensor: Tensor) -> Tensor:
        return change("" if found == first else found, tensor)

    try:
        return _replaced(output, "", wanted, named)
    except _NoTensorError:
        places = [found for found, _ in walk_output(output, kv_cache=False)]
        has = f"tensors at {', '.join(repr(of + at) for at in places[:8])}" if places else "none"
        raise InvalidArgumentError(
            f"{of + path!r}: {of!r} {verb} no tensor at this place but "
            f"{type(output).__name__}, which has {has}"
        ) from None


class _NoTensorError(Exception):
    pass


def _replaced(value: Any, at: str, rest: str, change: Callable[[str, Tensor], Tensor]) -> Any:
    """`value` with the tensor at the path `rest` replaced; `at` is the path to `value`."""
    if not rest and isinstance(value, Tensor):
        return change(at, value)
    if _kind(type(value)) is _Walk.cache:
        raise UnsupportedError(
            f"{at + rest!r} is in a key-value cache, which modules change in place: edit what the "
            "key and value projections return"
        )
    for key, names, child in _children(value):
        for name in names:
            if rest.startswith(name) and rest[len(name) : len(name) + 1] in ("", "[", "."):
                new = _replaced(child, at + names[0], rest[len(name) :], change)
                return value if new is child else _with(value, key, new)
    raise _NoTensorError


def _children(value: Any) -> Iterator[tuple[Any, list[str], Any]]:
    """The values in a container: the key of each, the names that lead to it, and itself."""
    kind = _kind(type(value))
    if kind is _Walk.sequence:
        for i, child in enumerate(value):
            yield i, [f"[{i}]"], child
    elif kind is _Walk.mapping:
        own = {f"[{_key(key, position)}]" for position, key in enumerate(value)}
        for position, (key, child) in enumerate(value.items()):
            names = [f"[{_key(key, position)}]", f"[{position}]"]
            yield key, names if names[1] not in own else names[:1], child
    elif kind is _Walk.dataclass:
        for field in dataclasses.fields(value):
            names = [f".{field.name}", f"[{field.name!r}]"]
            yield field.name, names, getattr(value, field.name, None)


def _with(container: Any, key: Any, new: Any) -> Any:
    """A copy of a container with one other value."""
    if isinstance(container, tuple):
        values = [*container[:key], new, *container[key + 1 :]]
        make = getattr(type(container), "_make", type(container))  # _make: of a named tuple
        return make(values)
    if isinstance(container, Mapping) and not isinstance(container, MutableMapping):
        return type(container)({**container, key: new})  # type: ignore[call-arg]
    changed: Any = copy.copy(container)
    if isinstance(container, (list, MutableMapping)):
        changed[key] = new
    else:
        object.__setattr__(changed, key, new)  # a dataclass may be frozen
    return changed
