"""Lets a package import a module when one of its names is first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy(
    package: str, modules: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The ``__getattr__`` and ``__dir__`` of a package with lazy names.

    Args:
        package: the package's ``__name__``.
        modules: for each name the module that defines it, relative to the package.
    """
    # A module must not have the name of its value: importing package.name sets package.name to the
    # module.
    assert all(module != f".{name}" for name, module in modules.items()), modules

    def getattribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name], package), name)
        setattr(sys.modules[package], name, value)
        return value

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return getattribute, directory
