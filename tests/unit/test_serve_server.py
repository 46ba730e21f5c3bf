"""The socket of `strap serve`."""

from __future__ import annotations

import asyncio
import socket

from llm_instrumentation.serve._server import _listening


def test_answers_do_not_wait_for_acknowledgements():
    async def no_delay() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            its = writer.get_extra_info("socket")
            found.set_result(its.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with _listening(0) as listening:
            async with await asyncio.start_server(connected, sock=listening):
                _, writer = await asyncio.open_connection(*listening.getsockname())
                writer.close()
                return await found

    assert asyncio.run(no_delay())
