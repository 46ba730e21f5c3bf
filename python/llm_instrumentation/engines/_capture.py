"""A capture inside an engine's worker, which knows the requests of each packed batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn

from .._warn import warn
from ..core.config import InstrumentationConfig
from ..core.framework import InstrumentationFramework
from ..core.labels import annotate
from ..core.packed import packed

__all__ = ["EngineBatch", "EngineCapture"]


# So many requests are remembered, the latest ones: far more than an engine has under way.
_MOST_TEXTS = 1 << 16


class EngineBatch(NamedTuple):
    """What a call of the model is given.

    Attributes:
        ids: the engine's id of each request, in the order of their tokens.
        names: the name of each request, for the rows of the capture.
        lengths: tokens of each request in this call.
        starts: the position of each request's first token in this call; None: the call's own
            positions count.
    """

    ids: tuple[str, ...]
    names: tuple[str, ...]
    lengths: tuple[int, ...]
    starts: tuple[int, ...] | None


class _RequestText:
    """Stands for the text of one request; a capture recognises it."""


class EngineCapture:
    """A running capture of an engine's model. Calls that are not for requests are left out.

    Args:
        model: the model.
        entries: the modules that the engine calls.
        batch_of: what a call that begins is given, by its arguments; None: it is not for requests,
            such as one that measures memory.
        output_path: a stream, or a run folder.
        config: the configuration.
        overwrite: replace any file at the path; without it only that of a capture.
        key: tells the captures of an engine apart.

    Attributes:
        key: as given.

    Raises:
        StrapError: the stream cannot be opened.
    """

    def __init__(
        self,
        model: nn.Module,
        entries: Iterable[nn.Module],
        batch_of: Callable[[tuple[Any, ...], dict[str, Any]], EngineBatch | None],
        output_path: str,
        config: InstrumentationConfig,
        *,
        overwrite: bool,
        key: str | None,
    ) -> None:
        self._batch_of = batch_of
        self._told = False
        self.key = key
        self._texts: dict[str, _RequestText] = {}  # those of the latest batches last
        self._batch = contextlib.ExitStack()
        self._framework = InstrumentationFramework(config)
        self._framework.instrument_model(model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                self._framework.capture_activations(output_path, overwrite=overwrite)
            )
            # These come after the capture's own hooks, and before them in the order of calls.
            for entry in entries:
                before = nn.Module.register_forward_pre_hook(
                    entry, self._enter, prepend=True, with_kwargs=True
                )
                after = nn.Module.register_forward_hook(entry, self._leave, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            stack.callback(self._batch.close)
            self._framework.pause()
            self._stack = stack.pop_all()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._batch.close()
        try:
            batch = self._batch_of(args, kwargs)
            if batch is None:
                self._framework.pause()
                return
            self._framework.resume()
            texts = list(map(self._text_of, batch.ids))
            self._batch.enter_context(packed(batch.lengths, starts=batch.starts, texts=texts))
            self._batch.enter_context(annotate(request=list(batch.names)))
        except Exception as error:  # the engine goes on
            if self._framework.config.strict:
                raise
            self._framework.resume()
            if not self._told:
                self._told = True
                warn(f"rows of {self.path} do not have their requests: {error!r}")

    def _text_of(self, request: str) -> _RequestText:
        text = self._texts.pop(request, None) or _RequestText()
        self._texts[request] = text
        if len(self._texts) > _MOST_TEXTS:
            del self._texts[next(iter(self._texts))]
        return text

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._batch.close()

    @property
    def path(self) -> str:
        """The stream."""
        return self._framework.stats().path

    def counters(self) -> dict[str, Any]:
        """The path and the counters of the capture."""
        stats = self._framework.stats()
        return {"path": stats.path, **stats.counters()}

    def close(self) -> None:
        """Ends the capture.

        Raises:
            StrapError: the capture failed.
        """
        self._stack.close()
