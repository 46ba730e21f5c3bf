"""Runs probes in the kernel: ``strap_probe_start`` to ``strap_probe_stop``."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Mapping
from typing import Any

from .library import Error, c_string, check, library

__all__ = ["Probe"]


class Probe:
    """A running probe. Thread-safe.

    Args:
        kind: one of the kinds that strap.h lists at ``strap_probe_start``.
        options: the options of this kind, listed there too.

    Raises:
        StrapError: the probe cannot start; strap.h lists the errors.
    """

    def __init__(self, kind: str, options: Mapping[str, Any]) -> None:
        self._lib = library()
        handle, error = ctypes.c_uint64(), Error()
        text = json.dumps(dict(options)).encode()
        status = self._lib.strap_probe_start(c_string(kind, "kind"), text, handle, error)
        check(status, error)
        self._handle = handle.value
        self._room = 1 << 16

    def read(self) -> dict[str, Any]:
        """The snapshot of what the probe counted since the last call, or since the start.

        Raises:
            InvalidStateError: the probe is stopped.
        """
        while True:
            room = ctypes.create_string_buffer(self._room)
            needed, error = ctypes.c_size_t(), Error()
            status = self._lib.strap_probe_read(self._handle, room, len(room), needed, error)
            if needed.value > len(room):
                self._room = 2 * needed.value
                continue  # the next call returns the same snapshot
            check(status, error)
            snapshot: dict[str, Any] = json.loads(room.value)
            return snapshot

    def stop(self) -> None:
        """Removes the probe's programs from the kernel.

        Raises:
            InvalidStateError: the probe is stopped already.
        """
        error = Error()
        check(self._lib.strap_probe_stop(self._handle, error), error)
