"""How the tensors of a model's modules lie: which are not [batch, tokens, width] of its text.

A shape can look so by accident: with as many experts' rows as tokens, as many patches of an image,
as many texts as tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, TypeAlias, get_args

__all__ = ["Layout", "Layouts", "is_foreign"]

Layout: TypeAlias = Literal["unordered", "foreign", "encoder", "both", "pairs", "width_first"]
"""What the vectors of a tensor are of, where its shape may mislead:

- ``unordered``: its rows are tokens in an order of their own, as inside experts.
- ``foreign``: it is of something else than the text's tokens, as of images, or of a cache.
- ``encoder``: it is of the encoder's text, as the keys of cross-attention.
- ``both``: it is of the encoder's text in one call, and of the decoder's in another one.
- ``pairs``: it is of pairs of places, as relative positions.
- ``width_first``: its tokens are behind the width, as of :class:`torch.nn.Conv1d`.
"""

# Parts of models for something else than text that have no configuration of their own.
_FOREIGN = re.compile(
    r"(^|_)(vision|visual|image|video|audio|speech|qformer|perceiver|resampler|multi_modal|mm"
    r"|modality|connector)"
    r"(_|$|model|tower|encoder|embed|projection|projector|connector|expert)"
)
# Keys of the mappings among outputs.
_KEY = re.compile(r"\['([^']+)'\]")
# Arguments with the vectors of the encoder, in a decoder.
_OF_ENCODER = ("['encoder_", "['key_value_states']")
# Endings of the paths of arguments and gradients; see `capture_state`.
_ENDINGS = re.compile(r"(![a-z]+)+$")
# Caches, global tokens of sparse attention, and a vector for each text.
_NO_TOKENS = frozenset({"mems", "state", "global", "pooler_output"})


class Layouts:
    """How the tensors of one model's modules lie.

    Args:
        modules: what the vectors of modules are of, by their names. A module inside another one
            has the same, unless it has its own.
        sequence_first: the names of modules whose tensors, and those of all modules inside them,
            are [tokens, batch, ...].
        batch_first: all other tensors have the batch first.
        batch_first_parts: the names of parts of outputs that have the batch first in any module.
    """

    def __init__(
        self,
        modules: Mapping[str, str],
        sequence_first: Iterable[str],
        batch_first: bool,
        batch_first_parts: Iterable[str] = (),
    ) -> None:
        self._modules = dict(modules)
        self._sequence_first = frozenset(sequence_first)
        self._batch_first_parts = frozenset(batch_first_parts)
        self.batch_first = batch_first

    @classmethod
    def of_record(cls, record: object) -> Layouts:
        """From what :attr:`record` gave, perhaps a damaged one."""
        found = record if isinstance(record, Mapping) else {}
        modules, first = found.get("modules"), found.get("sequence_first")
        parts = found.get("batch_first_parts")  # older captures have none
        known = modules.items() if isinstance(modules, Mapping) else ()
        return cls(
            {str(name): str(kind) for name, kind in known if kind in get_args(Layout)},
            map(str, first) if isinstance(first, list) else (),
            found.get("batch_first") is True,
            map(str, parts) if isinstance(parts, list) else (),
        )

    @property
    def record(self) -> dict[str, object]:
        """For the calls file."""
        return {
            "modules": self._modules,
            "sequence_first": sorted(self._sequence_first),
            "batch_first": self.batch_first,
            "batch_first_parts": sorted(self._batch_first_parts),
        }

    def of(self, module: str, path: str = "") -> str | None:
        """What the vectors of a tensor are of, by the names of its module and its path.

        Returns:
            a :data:`Layout`; None: of the tokens of the text, if its shape is right.
        """
        for key in _KEY.findall(path):
            if is_foreign(key) or key in _NO_TOKENS:
                return "foreign"
        if path.startswith(_OF_ENCODER):
            return "encoder"
        for one in (*_outwards_of_path(module, path), *_outwards(module)):
            if one in self._modules:
                return self._modules[one]
        return None

    def sequence_first(self, module: str, path: str = "") -> bool:
        """Whether a tensor of a module is [tokens, batch, ...]."""
        if self._is_batch_first_part(module, path):
            return False
        return not self._sequence_first.isdisjoint(_outwards(module))

    def has_batch_first(self, module: str, path: str = "") -> bool:
        """Whether a tensor of a module is known to have the batch first."""
        if self._is_batch_first_part(module, path):
            return True
        return self.batch_first and not self.sequence_first(module)

    def _is_batch_first_part(self, module: str, path: str) -> bool:
        return not self._batch_first_parts.isdisjoint(_outwards_of_path(module, path))


def _outwards(module: str) -> Iterator[str]:
    """A module's name, and those of the modules around it, without the root's."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _outwards_of_path(module: str, path: str) -> Iterator[str]:
    """A tensor's name, and those of what it is in. Arguments and gradients are as the output."""
    path = _ENDINGS.sub("", path)
    while path:
        yield module + path
        path = path[: path.rindex("[")]


def is_foreign(name: str) -> bool:
    """Whether a part of a model or of its outputs is of something else than text, by its name."""
    return _FOREIGN.search(name) is not None
