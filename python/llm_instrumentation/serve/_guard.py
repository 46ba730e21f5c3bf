"""Lets only the person who started a server use it.

Other users of the machine, other servers on it, and pages of other sites in the same browser can
reach the port. A request for anything of a capture therefore needs a secret, the header
X-Strap-Token. The address that is printed has it. The page's script keeps it for its own origin,
which includes the port, and sets the header. A cookie would go to every port of 127.0.0.1. The page
itself is the same for all, so it needs no secret. The Host header is checked, because a foreign
site may let its name lead to 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import secrets
from urllib.parse import parse_qsl

from .._extras import extra

with extra("serve", "strap serve"):
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.responses import PlainTextResponse, Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["OWNER", "Guard"]

#: The entry of a request's scope that says that it had the secret.
OWNER = "llm_instrumentation.owner"

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """An application that checks each request before it gives it to another one.

    Args:
        app: the application.
        token: the secret.
        port: of the server.
    """

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app = app
        self._token = token
        # Browsers leave out the port that is usual for http.
        self._hosts = {
            name + end
            for name in ("127.0.0.1", "localhost")
            for end in (f":{port}", *([""] if port == 80 else []))
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server takes no websockets and has no lifespan"

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answer = self._refusal(scope) or self._admission(scope)
        await (answer or self._app)(scope, receive, guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that is not for us; None: it is."""
        hosts = Headers(scope=scope).getlist("host")
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            return PlainTextResponse("The request is for another host.\n", 403)
        if scope["method"] != "GET":
            return PlainTextResponse("Only GET is allowed.\n", 405, {"Allow": "GET"})
        return None

    def _admission(self, scope: Scope) -> Response | None:
        """The answer to a request without the secret that it needs; None: it may pass."""
        given = Headers(scope=scope).getlist("x-strap-token")
        if scope["path"] == "/" or scope["path"].startswith("/static/"):
            query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            given = [value for name, value in query if name == "token"]
            return None if all(map(self._is_token, given)) else _forbidden()
        if len(given) != 1 or not self._is_token(given[0]):
            return _forbidden()
        scope[OWNER] = True
        return None

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _forbidden() -> Response:
    return PlainTextResponse(
        "Open the address that strap serve has printed, with its token: paste it into the address "
        "bar. Each start has a token of its own.\n",
        403,
    )
