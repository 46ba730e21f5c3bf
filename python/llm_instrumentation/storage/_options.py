"""How stores are reached, and where copies of ranges are kept."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import InvalidArgumentError

__all__ = ["StorageOptions"]

_FOLDER, _BYTES = "STRAP_CACHE_FOLDER", "STRAP_CACHE_BYTES"


def _cache_folder() -> Path:
    if given := os.environ.get(_FOLDER):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llm_instrumentation"


def _cache_bytes() -> int:
    given = os.environ.get(_BYTES)
    if given is None:
        return 4 << 30
    if not given.isdecimal():
        raise InvalidArgumentError(f"{_BYTES} = {given!r} is no number of bytes")
    return int(given)


@dataclasses.dataclass(frozen=True)
class StorageOptions:
    """The connections to stores, and the place of copies of ranges.

    Attributes:
        cache_folder: a reader keeps its copy in a folder of its own in here, and removes it when it
            is closed. Default: STRAP_CACHE_FOLDER of the environment, else
            ~/.cache/llm_instrumentation.
        cache_bytes: the most bytes of packets that a reader keeps; a packet that is larger is kept
            alone. The streams of a run folder share them evenly. Default: STRAP_CACHE_BYTES of the
            environment, else 4 GiB.
        connections: requests of a reader at a time.
        timeout_s: seconds that one request may take.
        deadline_s: seconds in which a request is repeated, with growing pauses, before it fails.
        store: settings of the store that the environment does not have, by the names of obstore:
            {"endpoint": "https://...", "region": "..."}.

    Raises:
        InvalidArgumentError: (a ValueError) a number is not above 0.
    """

    cache_folder: Path = dataclasses.field(default_factory=_cache_folder)
    cache_bytes: int = dataclasses.field(default_factory=_cache_bytes)
    connections: int = 8
    timeout_s: float = 30.0
    deadline_s: float = 120.0
    store: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in ("cache_bytes", "connections", "timeout_s", "deadline_s"):
            if not (value := getattr(self, name)) > 0:
                raise InvalidArgumentError(f"{name} = {value!r} must be above 0")
