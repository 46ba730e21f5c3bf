"""Counts the forward calls of a model, and the calls of its modules within each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from torch import nn

from ...core.calls.arguments import Given, given_to, is_main_part
from ...core.calls.caches import cached_tokens_of_call
from ...core.calls.generation import Ended
from ...core.calls.steps import Place, Steps
from ...errors import UnsupportedError
from .places import Places

__all__ = ["Forwards"]


class Handle(Protocol):
    """A registered hook."""

    def remove(self) -> None: ...


class Attachable(Protocol):
    """Registers a hook."""

    def attach(self) -> Handle: ...


class Forwards:
    """The forward calls of a model in a block. Steps are those of captures (`core.calls.steps`).

    It refers to nothing of its block, because its own parts refer to each other: they are freed
    when garbage is collected, and values that edits keep would wait for that.

    Args:
        model: the model.
        counters: the number of counters that begin at 0 in each step.
        mine: reports whether a call that begins now belongs to the block; None: all do.
        places: the modules of the block's edits. Each call checks that they are in their places.
    """

    def __init__(
        self,
        model: nn.Module,
        counters: int,
        mine: Callable[[], bool] | None,
        places: Places,
    ) -> None:
        self._model = model
        self._places = places
        self._undo = ExitStack()
        self._local = threading.local()
        self._ended = Ended()
        self._steps = Steps([model], counters, self, mine=mine)

    @property
    def count(self) -> int:
        """The number of forward calls so far."""
        return self._steps.numbers.count

    @contextmanager
    def watched(self, inside: Iterable[Attachable]) -> Iterator[None]:
        """Hooks the modules through which calls enter the model.

        Args:
            inside: the hooks of the block; a step includes them.
        """
        entries = self._steps.entries
        with self._undo:
            self._undo.callback(self._steps.forget)
            self._undo.callback(entries.remove)
            entries.hook_begins()
            for one in inside:
                self._undo.callback(one.attach().remove)
            entries.hook_ends()
            yield

    def here(self, name: str) -> tuple[Place, Given | None] | None:
        """The running step, and what the model was given; None: it does not belong to the block.

        Args:
            name: the module that runs, for messages.

        Raises:
            UnsupportedError: a backward pass recomputes the module.
        """
        place = self._steps.here()
        if not place.mine:
            return None
        if place.again:
            raise UnsupportedError(
                f"{name!r} is recomputed in a backward pass, and an edit does not know for which "
                "step: switch gradient checkpointing off, as with "
                "model.gradient_checkpointing_disable()"
            )
        return place, getattr(self._local, "given", None)

    def token(self) -> int:
        """Tokens are not tracked."""
        return -1

    def request(self) -> int:
        """Calls serve no request."""
        return 0

    def begins(
        self, module: nn.Module, args: Any, kwargs: Any, step: int | None, late: bool
    ) -> None:
        """Keeps what a call is given; see :class:`StepObserver`."""
        self._places.check()
        held = cached_tokens_of_call(args, kwargs) if not late else None
        main = is_main_part(module, [self._model])
        self._local.given = given_to(module, args, kwargs, held=held, main=main, ended=self._ended)

    def ends(self, given: Any, output: Any, error: BaseException | None) -> None:
        """Does nothing: `begins` returns None."""
