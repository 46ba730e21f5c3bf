"""Regions of a traced PyTorch process: each storage, from its allocation to its release.

The allocator reuses an address as soon as a tensor is released, so an address does not identify
memory. The address of the storage object does: the table holds a weak reference to each storage
that it has met. The reference keeps the small C++ object alive, but not its memory, so no other
storage gets that object's address. Every few thousand rows the table drops the storages that have
been released.

There are no locks: any thread may run an operator at any time, and a finaliser may run one between
any two steps of another operator. So each step here is one that the interpreter does atomically.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ...schema import RegionType
from .spool import Spool

__all__ = ["NOWHERE", "TYPES", "LabelledRegions", "Regions", "devices_of"]

# A word is one integer that describes a storage: from the top its region id, one bit that says
# whether it was first seen while the weights were loaded, and the number of its device.
_DEVICE_BITS = 8
_LOADING = 1 << _DEVICE_BITS
_ID_SHIFT = _DEVICE_BITS + 1

#: The word of a tensor without memory.
NOWHERE = -1

#: The region id of all weights, as in every trace of this package.
WEIGHT_ID = 1

_expired = torch.UntypedStorage._expired
_free_weak_ref = torch.UntypedStorage._free_weak_ref


def devices_of(words: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The device numbers of a column of words; 0 is the CPU."""
    return words & (_LOADING - 1)


@dataclass(frozen=True)
class LabelledRegions:
    """Which storages are weights or cache, at the end of a trace.

    A storage that is marked as both is labelled kv_cache.
    """

    weights: npt.NDArray[np.int64]  #: (n,) words, sorted
    cache: npt.NDArray[np.int64]  #: (n, 2) words, sorted by them, and region ids

    def label(
        self, words: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """The region ids of a column of words, and their types as positions in :data:`TYPES`."""
        ids = words >> _ID_SHIFT
        types = np.where(words & _LOADING, np.int8(_RUNTIME), np.int8(_ACTIVATION))
        for known, kind in ((self.weights, _WEIGHT), (self.cache[:, 0], _KV_CACHE)):
            if len(known):
                place = np.minimum(np.searchsorted(known, words), len(known) - 1)
                found = known[place] == words
                types[found] = kind
                ids[found] = WEIGHT_ID if kind == _WEIGHT else self.cache[place[found], 1]
        return ids, types


TYPES = tuple(
    kind.value
    for kind in (
        RegionType.WEIGHT,
        RegionType.KV_CACHE,
        RegionType.ACTIVATION,
        RegionType.RUNTIME,
    )
)
_WEIGHT, _KV_CACHE, _ACTIVATION, _RUNTIME = range(4)


class Regions:
    """The storages met so far: all live ones, and those released since the last clean-up.

    Attributes:
        words: the word of each storage, by its ``_cdata``, the address of the C++ object.
        forgotten: gets another value, never the same one again, before the ``_cdata`` of released
            storages may belong to others. Then caches that use ``_cdata`` as a key are stale.
    """

    def __init__(self, by_layer: bool, spool: Spool) -> None:
        """``spool`` gets marks for the storages of weights and caches, and names of devices."""
        self._spool = spool
        self.words: dict[int, int] = {}
        self.forgotten = ctypes.c_int64(0)  # trace.c reads it
        self._clean_ups = itertools.count(1)
        self._loading = 0
        self._by_layer = by_layer
        self._numbers = itertools.count((WEIGHT_ID + 1) << _ID_SHIFT, 1 << _ID_SHIFT)
        self._devices: dict[torch.device, int] = {torch.device("cpu"): 0}
        self._weights: set[int] = set()
        self._cache_now: dict[str, int] = {}
        self._cache_ids: dict[str, int] = {}

    def meet(self, tensor: torch.Tensor) -> int:
        """The word of a tensor's storage. A new storage becomes a region."""
        storage = tensor.untyped_storage()
        word = self.words.get(storage._cdata)
        return self.add(storage, tensor) if word is None else word

    def add(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> int:
        """Makes a new storage a region and returns its word."""
        kind = 0 if tensor.is_cpu else self._kind(tensor)
        if kind == NOWHERE:
            return NOWHERE
        word = next(self._numbers) | kind | self._loading
        # If two threads add the same storage at once, the later word stays.
        self.words[storage._weak_ref()] = word  # type: ignore[index]
        return word

    def _kind(self, tensor: torch.Tensor) -> int:
        if tensor.is_meta:
            return NOWHERE
        number = self._devices.get(tensor.device)
        if number is None:
            number = self._devices.setdefault(tensor.device, len(self._devices))
            self._spool.tell(devices={number: str(tensor.device)})
        return number

    @property
    def loading(self) -> bool:
        """Whether weights are being loaded: storages first met now get the loading bit."""
        return self._loading != 0

    @loading.setter
    def loading(self, loading: bool) -> None:
        self._loading = _LOADING if loading else 0

    def see_parameter(self, parameter: torch.nn.Parameter) -> bool:
        """Marks a parameter that an operator was given as a weight; returns whether it is one.

        Offloading makes new parameters for a single call, so attaching does not see them. While
        weights are loaded nothing is marked: the sources of the copies are parameters too.
        """
        if self._loading or parameter.layout is not torch.strided:
            return False
        self.mark_weight(parameter)
        return True

    def mark_weight(self, tensor: torch.Tensor) -> bool:
        """Marks a tensor's storage as weight; False if it was marked before or has no memory."""
        word = self.meet(tensor)
        if word == NOWHERE or word in self._weights:
            return False
        self._weights.add(word)
        self._spool.mark_weight(word)
        return True

    def mark_cache(self, tensor: torch.Tensor, name: str) -> None:
        """Marks a tensor's storage as cache; ``name`` identifies the layer, and key or value."""
        word = self.words.get(tensor.untyped_storage()._cdata)
        if word is None:
            word = self.meet(tensor)
        if self._cache_now.get(name) == word or word == NOWHERE:
            return
        self._cache_now[name] = word
        own_id = word >> _ID_SHIFT
        region_id = self._cache_ids.setdefault(name, own_id) if self._by_layer else own_id
        self._spool.mark_cache(word, region_id)

    def forget_dead(self) -> None:
        """Drops the storages that have been released."""
        dead = [
            pointer
            for pointer in list(self.words)
            if _expired(pointer) and self.words.pop(pointer, None) is not None
        ]
        # Other threads fill their caches meanwhile, but no longer with what is dead.
        self.forgotten.value = next(self._clean_ups)
        for pointer in dead:
            _free_weak_ref(pointer)

    def forget_all(self) -> None:
        while self.words:
            _free_weak_ref(self.words.popitem()[0])
