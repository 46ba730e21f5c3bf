"""Answers that take long: lines of JSON that tell how far they are, and the answer as the last one.

A line is ``{"done": 7, "of": 48}`` in rows, ``{"found": ...}``, or ``{"error": "..."}``. An answer
that is there at once, and an error before the first value is read, are sent as usual.

The steps of a scan are done in the thread that reads captures, one at a time, so other requests are
answered between two of them. One scan is under way at a time, which bounds their memory. If its
client goes, it ends behind its present step.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from typing import Any

from .._extras import extra

with extra("serve", "strap serve"):
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse
    from starlette.types import Receive, Send
    from starlette.types import Scope as RequestScope

from ..errors import StrapError
from ._query import Query
from ._units import Scan

__all__ = ["Scans"]


@dataclasses.dataclass(frozen=True)
class _ScanAnswer:
    """What a scan has returned."""

    answer: Any


class Scans:
    """Runs the scans of all requests, one after the other.

    Args:
        worker: the one thread that reads captures.
        encoded: makes the bytes of JSON.
    """

    def __init__(self, worker: Executor, encoded: Callable[[Any], bytes]) -> None:
        self._worker, self._encoded = worker, encoded
        self._turn = asyncio.Lock()

    def answering(self, begin: Callable[[Query], Scan]) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint that runs the scan of a query."""

        async def endpoint(request: Request) -> Response:
            query = Query(request.query_params)
            scan = await self._done(begin, query)
            await self._turn.acquire()
            try:
                first = await self._done(_step, scan)
                if not isinstance(first, _ScanAnswer):
                    return _ScanLines(self._lines(scan, first), lambda: self._end(scan))
            except BaseException:
                self._end(scan)
                raise
            self._end(scan)
            return Response(self._encoded(first.answer), media_type="application/json")

        return endpoint

    async def _done(self, action: Callable[..., Any], *given: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._worker, action, *given)

    def _end(self, scan: Scan) -> None:
        """Lets the next scan begin. The memory of this one goes behind its present step."""
        self._turn.release()
        with contextlib.suppress(RuntimeError):  # the server ends, and takes no more work
            self._worker.submit(scan.close)

    async def _lines(self, scan: Scan, step: Any) -> AsyncIterator[bytes]:
        try:
            while not isinstance(step, _ScanAnswer):
                done, of = step
                yield self._line({"done": done, "of": of})
                step = await self._done(_step, scan)
            yield self._line({"found": step.answer})
        except StrapError as error:
            yield self._line({"error": str(error)})
        except Exception as error:
            print(f"strap serve: {error!r}", file=sys.stderr)
            yield self._line({"error": f"{type(error).__name__}: {error}"})

    def _line(self, value: Any) -> bytes:
        return self._encoded(value) + b"\n"


def _step(scan: Scan) -> Any:
    """The next step of a scan, or what it has found."""
    try:
        return next(scan)
    except StopIteration as end:  # which no future can hold
        return _ScanAnswer(end.value)


class _ScanLines(StreamingResponse):
    """Lines of JSON; `ended` is called when the last one is sent, or the client is gone."""

    def __init__(self, lines: AsyncIterator[bytes], ended: Callable[[], None]) -> None:
        super().__init__(lines, media_type="application/x-ndjson")
        self._ended = ended

    async def __call__(self, scope: RequestScope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()
