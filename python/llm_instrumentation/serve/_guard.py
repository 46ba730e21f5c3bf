"""Lets only the person who started a server use it.

Other users of the machine, and pages of other sites in the same browser, can reach the port. A
request therefore needs a secret: as `token` in the address of the first request, which sets a
cookie, and then as this cookie. Browsers send the cookie with requests of our own pages alone
(SameSite). The Host header is checked, because a foreign site may let its name lead to 127.0.0.1
(DNS rebinding).
"""

from __future__ import annotations

import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from .._extras import extra

with extra("serve", "strap serve"):
    from starlette.datastructures import Headers, MutableHeaders
    from starlette.responses import PlainTextResponse, RedirectResponse, Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["Guard"]

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
        port: of the server. Cookies do not know ports, so the cookie's name has it.
    """

    def __init__(self, app: ASGIApp, *, token: str, port: int) -> None:
        self._app = app
        self._token = token
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._cookie = f"strap-{port}"

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
        """The answer to a request without the cookie; None: it has the cookie.

        A request with the token gets the cookie, and is sent to the address without the token.
        """
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        tokens = [value for name, value in query if name == "token"]
        if tokens:
            if not all(map(self._is_token, tokens)):
                return _forbidden()
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            answer = RedirectResponse(f"/?{rest}" if rest else "/", 303)
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="strict")
            return answer
        return None if self._has_cookie(scope) else _forbidden()

    def _has_cookie(self, scope: Scope) -> bool:
        for header in Headers(scope=scope).getlist("cookie"):
            try:
                found = SimpleCookie(header).get(self._cookie)
            except CookieError:
                continue
            if found is not None and self._is_token(found.value):
                return True
        return False

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self._token.encode())


def _forbidden() -> Response:
    return PlainTextResponse(
        "Open the address that strap serve has printed, with its token: paste it into the address "
        "bar. Each start has a token of its own.\n",
        403,
    )
