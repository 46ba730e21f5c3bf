"""Regions of a traced PyTorch process: each storage, from its allocation to its release.

Addresses are given out again as soon as a tensor dies, so an address does not tell what lies
there. A storage object does: the table holds a weak reference to each storage that it has
met, which keeps the small object that stands for it (not its memory) from being given out
again, so that its identity is never that of another storage. Storages that have died are let
go every few thousand rows.

There are no locks: any thread may run an operator at any time, and a finaliser may run one
between any two steps of another. Each step here is one that the interpreter does at once.
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

# A region as one number, a word: its id, whether it was first seen while the weights were
# loaded, and its device.
_DEVICE_BITS = 8
_LOADING = 1 << _DEVICE_BITS
_ID_SHIFT = _DEVICE_BITS + 1

#: The word of a tensor without memory.
NOWHERE = -1

#: All weights are region 1, as mrm-trace has it.
WEIGHT_ID = 1

_expired = torch.UntypedStorage._expired
_free_weak_ref = torch.UntypedStorage._free_weak_ref


def devices_of(words: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Positions in :attr:`LabelledRegions.devices` of a column of words."""
    return words & (_LOADING - 1)


@dataclass(frozen=True)
class LabelledRegions:
    """What is known at the end of a trace. A storage that is both is one of the cache."""

    weights: npt.NDArray[np.int64]  #: (n,) words, sorted
    cache: npt.NDArray[np.int64]  #: (n, 2) words, sorted, and ids

    def label(
        self, words: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int8]]:
        """Region ids, and positions in :data:`TYPES`, of a column of words."""
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
    """The storages met so far, by ``_cdata``; the live ones and a few that have died.

    Attributes:
        words: the word of each storage.
        forgotten: grows before the ``_cdata`` of storages that have died may be others'.
    """

    def __init__(self, by_layer: bool, spool: Spool) -> None:
        """``spool`` is told what storages are for."""
        self._spool = spool
        self.words: dict[int, int] = {}
        self.forgotten = ctypes.c_int64(0)  # read by C
        self._loading = 0
        self._by_layer = by_layer
        self._numbers = itertools.count((WEIGHT_ID + 1) << _ID_SHIFT, 1 << _ID_SHIFT)
        self._devices: dict[torch.device, int] = {torch.device("cpu"): 0}
        self._weights: set[int] = set()
        self._cache_now: dict[str, int] = {}
        self._cache_ids: dict[str, int] = {}

    def meet(self, tensor: torch.Tensor) -> int:
        """The word of a tensor's storage, which becomes a region if it is new."""
        storage = tensor.untyped_storage()
        word = self.words.get(storage._cdata)
        return self.add(storage, tensor) if word is None else word

    def add(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> int:
        """Makes a storage that has not been met a region."""
        kind = 0 if tensor.is_cpu else self._kind(tensor)
        if kind == NOWHERE:
            return NOWHERE
        word = next(self._numbers) | kind | self._loading
        # Two threads may add the same one: it then has the later word.
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
        """Whether what is met now belongs to the load of the weights."""
        return self._loading != 0

    @loading.setter
    def loading(self, loading: bool) -> None:
        self._loading = _LOADING if loading else 0

    def see_parameter(self, parameter: torch.nn.Parameter) -> bool:
        """Makes a storage a weight that an operator was given as a parameter, and says whether.

        Offloading brings parameters in for one call. While weights are loaded, parameters are
        also what they are copied from.
        """
        if self._loading or parameter.layout is not torch.strided:
            return False
        self.mark_weight(parameter)
        return True

    def mark_weight(self, tensor: torch.Tensor) -> bool:
        """Makes a tensor's storage a weight; False if it was one."""
        word = self.meet(tensor)
        if word == NOWHERE or word in self._weights:
            return False
        self._weights.add(word)
        self._spool.mark_weight(word)
        return True

    def mark_cache(self, tensor: torch.Tensor, name: str) -> None:
        """Makes a tensor's storage one of the cache; ``name`` tells layer, key or value."""
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
        """Lets go of the storages that have died."""
        self.forgotten.value += 1
        for pointer in list(self.words):
            if _expired(pointer) and self.words.pop(pointer, None) is not None:
                _free_weak_ref(pointer)

    def forget_all(self) -> None:
        while self.words:
            _free_weak_ref(self.words.popitem()[0])
