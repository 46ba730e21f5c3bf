"""An HTTP proxy between a client and a store, which does what networks and stores do at times."""

from __future__ import annotations

import http.client
import http.server
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

EXPIRED = (
    b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>ExpiredToken</Code>'
    b"<Message>The provided token has expired.</Message><Token>secret-token</Token></Error>"
)


_ANSWERS = {"503": (503, b"busy"), "expired": (400, EXPIRED), "refused": (405, b"no")}


class Request(NamedTuple):
    """A request that came by.

    Attributes:
        number: of the request, from 0.
        method: as in HTTP.
        path: with the query.
        range: the header Range; "" if there is none.
    """

    number: int
    method: str
    path: str
    range: str


class Proxy:
    """A proxy on a port of its own.

    Attributes:
        url: its endpoint.
        fault: gives for a request the name of a fault, or "" for none:
            "reset" (the connection is reset before the answer), "503", "expired", "truncated" (the
            answer ends early), "wrong" (a byte of the answer changes), "slow" (the answer takes
            longer than the client waits), "refused" (status 405), "wrong upload" (a byte of the
            request changes).
        requests: all that came.
        answered: bytes of the bodies of GET that were passed on, errors aside.
        received: bytes of the bodies of requests.
    """

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream.removeprefix("http://")
        self.fault: Callable[[Request], str] = lambda request: ""
        self.requests: list[Request] = []
        self.answered = self.received = 0
        self.slow_s = 3.0
        self.bytes_per_second: float | None = None
        self._lock = threading.Lock()
        self._wrong = 0
        self.stopping = threading.Event()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except (TimeoutError, ConnectionError):
                    self.close_connection = True

            def pass_on(self) -> None:
                proxy._pass_on(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on  # noqa: N815

            def log_message(self, *_: object) -> None: ...

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, *_: object) -> None: ...  # a client that went away

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.stopping.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def forget(self) -> None:
        """Begins to count anew."""
        self.requests, self.answered, self.received = [], 0, 0

    def _pass_on(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        with self._lock:
            request = Request(
                len(self.requests), handler.command, handler.path, handler.headers.get("Range", "")
            )
            self.requests.append(request)
        fault = self.fault(request)
        body = bytearray(self._body(handler))
        if fault in _ANSWERS:
            return self._answer(handler, fault)
        if fault == "wrong upload" and body:
            body[len(body) // 2] ^= 1
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        try:
            connection.putrequest(
                handler.command, handler.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in handler.headers.items():
                if name.lower() not in ("connection", "transfer-encoding"):
                    connection.putheader(name, value)
            connection.endheaders(bytes(body) or None)
            response = connection.getresponse()
            content = bytearray(response.read())
            self._return(handler, response, content, fault)
        finally:
            connection.close()

    def _body(self, handler: http.server.BaseHTTPRequestHandler) -> bytes:
        left, parts = int(handler.headers.get("Content-Length", 0)), []
        while left:
            block = handler.rfile.read(min(left, 1 << 16))
            if not block:
                raise ConnectionError
            if self.bytes_per_second is not None:
                time.sleep(len(block) / self.bytes_per_second)
            parts.append(block)
            left -= len(block)
            with self._lock:
                self.received += len(block)
        return b"".join(parts)

    def _answer(self, handler: http.server.BaseHTTPRequestHandler, fault: str) -> None:
        status, content = _ANSWERS[fault]
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(content)

    def _return(
        self,
        handler: http.server.BaseHTTPRequestHandler,
        response: http.client.HTTPResponse,
        content: bytearray,
        fault: str,
    ) -> None:
        if fault == "slow":
            self.stopping.wait(self.slow_s)
        if fault == "reset":  # closing it sends RST
            linger = struct.pack("ii", 1, 0)
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            handler.close_connection = True
            return
        handler.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length", "date"):
                handler.send_header(name, value)
        length = response.getheader("Content-Length", str(len(content)))
        handler.send_header("Content-Length", length)
        handler.end_headers()
        if handler.command == "HEAD":
            return
        if fault == "wrong" and content:
            # Another byte each time.
            self._wrong += 1
            content[len(content) // 2] ^= 1 + self._wrong % 255
        if fault == "truncated":
            content = content[: len(content) // 2]
            handler.close_connection = True
        handler.wfile.write(content)
        with self._lock:
            read = handler.command == "GET" and response.status < 300
            self.answered += len(content) if read else 0


@contextmanager
def faulty_proxy(upstream: str) -> Iterator[Proxy]:
    proxy = Proxy(upstream)
    try:
        yield proxy
    finally:
        proxy.close()
