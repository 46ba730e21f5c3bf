"""Runs the server: in the main thread until Ctrl-C, or in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from .._extras import extra

with extra("serve", "strap serve"):
    from uvicorn.config import Config
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import Server

from .._signals import ended_by_sigterm
from ..analysis.neurons.unit_logits import UnitLogits
from ..analysis.reader import ActivationReader
from ..errors import InvalidArgumentError, StrapIOError
from ._app import create_app
from ._captures import Capture
from ._effects import EffectMaps
from ._features import Features
from ._guard import OWNER
from ._tensors import Cache

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CaptureServer"]

_GRACE_S = 2  # for answers under way when it ends
_PATIENCE_S = 10  # until the last byte of a request, and until some of an answer is taken
_STRANGERS = 256  # connections without the token
# The connections that asyncio accepts in one turn. The owner has some turns to send the token.
_BACKLOG = 64


class _Protocol(H11Protocol):
    """Ends connections that uvicorn keeps for ever.

    They are those whose request does not come to an end, and those whose client does not read its
    answers. Beyond `_STRANGERS` connections without the token, the oldest makes room for the next.
    """

    _due: asyncio.TimerHandle | None = None  # until the request is complete
    _unread: asyncio.TimerHandle | None = None  # until all answers are taken

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._begun, self._was_owned = self.loop.time(), False
        strangers = [
            one for one in self.connections if isinstance(one, _Protocol) and not one._owned
        ]
        if len(strangers) >= _STRANGERS:
            oldest = min(strangers, key=lambda one: one._begun)
            self.connections.discard(oldest)  # at once: asyncio tells it later
            oldest.transport.abort()
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # asyncio tells of each byte that waits
        self._watch()

    @property
    def _owned(self) -> bool:
        """Whether one of its requests had the token."""
        return self._was_owned or (self.scope is not None and OWNER in self.scope)

    def data_received(self, data: bytes) -> None:
        self._was_owned = self._owned  # the next request may be for a file
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._due, self._unread):
            if timer is not None:
                timer.cancel()

    def _watch(self) -> None:
        complete = self.cycle is not None and not self.cycle.response_complete
        if complete and self._due is not None:
            self._due.cancel()
            self._due = None
        elif not complete and self._due is None:
            self._due = self.loop.call_later(_PATIENCE_S, self.transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_less()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()

    def _expect_less(self, than: int | None = None) -> None:
        """Ends the connection if no more of its answers was taken since it was asked last."""
        left = self.transport.get_write_buffer_size()
        if left == than:
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(_PATIENCE_S, self._expect_less, left)

    def send_400_response(self, msg: str) -> None:
        """Ends a connection that sends what is no HTTP. Only the first request gets an answer.

        uvicorn answers later ones too, while another answer may be on its way.
        """
        if self.cycle is None:
            super().send_400_response(msg)
        else:
            self.cycle.disconnected = True
            self.transport.close()


class CaptureServer:
    """Serves a page that looks into captures, to this machine and this user alone.

    It listens on 127.0.0.1 from its construction on, and changes no file. Use it as a context
    manager, which serves in a thread, or call `run`.

    It takes the memory of an `ActivationReader`, 64 MiB of decoded values, and 4 to 8 bytes for
    each token of the calls file once a text is looked at. While units are looked for, it takes 48
    MiB, and 70 bytes for each row of their layer. A model and effects that are given stay in
    memory.

    Args:
        sources: streams, or readers. A reader that is given stays open at the end.
        port: the port; 0: a free one.
        features: a folder that `save_features` has written, or None.
        effects: files that `interventions.Effects.save` has written.
        tokenizer: its `decode` gives the texts of tokens. None: the token file gives them where it
            has them; otherwise token ids stand for them.
        model: the model that was captured, for the tokens whose logits a unit raises and lowers.
        writes: how the units of a layer write to the residual stream of the model, as
            `functools.partial(written_by, model)`. Without it these tokens are left out.

    Attributes:
        url: the address to open, with the token that lets its owner in.

    Raises:
        StrapIOError: (an OSError) the port is taken.
        InvalidArgumentError: (a ValueError) `sources` is empty, or `port` is no port.
        MissingExtraError: (an ImportError) the extra `serve` is not installed.
        StrapError: a stream, the features or the effects cannot be read.
    """

    def __init__(
        self,
        sources: Iterable[str | os.PathLike[str] | ActivationReader],
        *,
        port: int = 0,
        features: str | os.PathLike[str] | None = None,
        effects: Iterable[str | os.PathLike[str]] = (),
        tokenizer: Any = None,
        model: nn.Module | None = None,
        writes: Callable[[str], nn.Module | None] | None = None,
    ) -> None:
        if not 0 <= port <= 65535:
            raise InvalidArgumentError(f"port = {port}: give one from 0 to 65535")
        with contextlib.ExitStack() as opened:
            logits = None if model is None or writes is None else UnitLogits(model, writes)
            cache, captures = Cache(), []
            for source in sources:
                captures.append(Capture(source, tokenizer, cache, logits))
                opened.callback(captures[-1].close)
            if not captures:
                raise InvalidArgumentError("no stream to serve: give one")
            described = None if features is None else Features(features)
            measured = [EffectMaps(path, tokenizer) for path in effects]
            worker = ThreadPoolExecutor(1, "strap-serve-reading")
            opened.callback(worker.shutdown, cancel_futures=True)
            # What the first page asks for is found while the browser starts.
            worker.submit(captures[0].prepare)
            self._socket = opened.enter_context(_listening(port))
            port, token = self._socket.getsockname()[1], secrets.token_urlsafe(32)
            self.url = f"http://127.0.0.1:{port}/?token={token}"
            app = create_app(captures, described, measured, worker, token=token, port=port)
            self._server = Server(
                Config(
                    app,
                    log_level="error",
                    access_log=False,
                    lifespan="off",
                    ws="none",
                    http=_Protocol,
                    backlog=_BACKLOG,
                    server_header=False,
                    timeout_graceful_shutdown=_GRACE_S,
                )
            )
            self._opened = opened.pop_all()
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Serves until Ctrl-C or SIGTERM, then closes. Main thread only."""
        with self._opened, contextlib.suppress(KeyboardInterrupt), ended_by_sigterm():
            self._server.run(sockets=[self._socket])

    def __enter__(self) -> CaptureServer:
        """Serves in a thread, until the end of the block or `close`."""
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="strap-serve", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the server. A second call does nothing."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()
        self._opened.close()


def _listening(port: int) -> socket.socket:
    """A socket that listens on this machine's own address.

    Raises:
        StrapIOError: the port is taken.
    """
    # asyncio sets TCP_NODELAY only on sockets of a stated protocol. Without it the bytes of an
    # answer wait 40 ms behind its head.
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(("127.0.0.1", port))
        found.listen(_BACKLOG)
    except OSError as error:
        found.close()
        failed = StrapIOError(f"port {port} of 127.0.0.1: {error.strerror}")
        failed.errno = error.errno
        raise failed from error
    return found
