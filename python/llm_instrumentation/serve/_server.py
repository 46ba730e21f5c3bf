"""Runs the server: in the main thread until Ctrl-C, or in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .._extras import extra

with extra("serve", "strap serve"):
    from uvicorn.config import Config
    from uvicorn.protocols.http.h11_impl import H11Protocol
    from uvicorn.server import Server

from .._signals import ended_by_sigterm
from ..analysis.reader import ActivationReader
from ..errors import InvalidArgumentError, StrapIOError
from ._app import create_app
from ._captures import Capture
from ._features import Features
from ._tensors import Cache

__all__ = ["CaptureServer"]

_GRACE_S = 2  # for answers under way when it ends
_REQUEST_S = 10  # until the last byte of a request
_CONNECTIONS = 256


class _Protocol(H11Protocol):
    """Ends a connection whose request does not come to an end. uvicorn waits for it for ever."""

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._due is not None:
            self._due.cancel()

    def _watch(self) -> None:
        complete = self.cycle is not None and not self.cycle.response_complete
        if complete and self._due is not None:
            self._due.cancel()
            self._due = None
        elif not complete and self._due is None:
            self._due = self.loop.call_later(_REQUEST_S, self.transport.close)


class CaptureServer:
    """Serves a page that looks into captures, to this machine and this user alone.

    It listens on 127.0.0.1 from its construction on, and changes no file. Use it as a context
    manager, or call `run`.

    Args:
        sources: streams, or readers. A reader that is given stays open at the end.
        port: the port; 0: a free one.
        features: a folder that `save_features` has written, or None.
        tokenizer: its `decode` gives the texts of tokens; None: token ids stand for them.

    Attributes:
        url: the address to open, with the token that lets its owner in.

    Raises:
        StrapIOError: (an OSError) the port is taken.
        InvalidArgumentError: (a ValueError) `sources` is empty, or `port` is no port.
        MissingExtraError: (an ImportError) the extra `serve` is not installed.
        StrapError: a stream or the features cannot be read.
    """

    def __init__(
        self,
        sources: Iterable[str | os.PathLike[str] | ActivationReader],
        *,
        port: int = 0,
        features: str | os.PathLike[str] | None = None,
        tokenizer: Any = None,
    ) -> None:
        if not 0 <= port <= 65535:
            raise InvalidArgumentError(f"port = {port}: give one from 0 to 65535")
        with contextlib.ExitStack() as opened:
            cache, captures = Cache(), []
            for source in sources:
                captures.append(Capture(source, tokenizer, cache))
                opened.callback(captures[-1].close)
            if not captures:
                raise InvalidArgumentError("no stream to serve: give one")
            described = None if features is None else Features(features)
            worker = ThreadPoolExecutor(1, "strap-serve-reading")
            opened.callback(worker.shutdown, cancel_futures=True)
            # What the first page asks for is found while the browser starts.
            worker.submit(captures[0].prepare)
            self._socket = opened.enter_context(_listening(port))
            port, token = self._socket.getsockname()[1], secrets.token_urlsafe(32)
            self.url = f"http://127.0.0.1:{port}/?token={token}"
            app = create_app(captures, described, worker, token=token, port=port)
            self._server = Server(
                Config(
                    app,
                    log_level="error",
                    access_log=False,
                    lifespan="off",
                    ws="none",
                    http=_Protocol,
                    limit_concurrency=_CONNECTIONS,
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
        found.listen(128)
    except OSError as error:
        found.close()
        failed = StrapIOError(f"port {port} of 127.0.0.1: {error.strerror}")
        failed.errno = error.errno
        raise failed from error
    return found
