"""Hostile requests to `strap serve`, and an owner who uses the page meanwhile::

    with Attack(target, requests=5000, connections=50) as attack:
        while attack.under_way:
            owner.ask()
    assert attack.let_in == [] and owner.failures == []

Each kind of request is a function of a random generator and the server, so that a seed gives the
same requests again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import itertools
import random
import re
import socket
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable

__all__ = ["KINDS", "Attack", "Owner", "Target"]

_ANSWER = re.compile(rb"HTTP/1\.1 (\d{3})[^\r]*\r\n(.*?)\r\n\r\n", re.DOTALL)
_LONGEST_S = 30  # that a hostile client waits for its answer


@dataclasses.dataclass(frozen=True)
class Target:
    """A server: the port on 127.0.0.1, and the secret token of its owner."""

    port: int
    token: str

    @classmethod
    def of(cls, url: str) -> Target:
        parts = urllib.parse.urlsplit(url)
        return cls(int(parts.port or 0), parts.query.removeprefix("token="))


@dataclasses.dataclass(frozen=True)
class Request:
    """The bytes of a hostile client.

    Attributes:
        pieces: sent one after the other.
        pause_s: seconds between two pieces.
        hold_s: how long the client waits for the end of the connection.
        read: whether it reads answers.
        data: whether it may get data of the capture.
    """

    pieces: list[bytes]
    pause_s: float = 0
    hold_s: float = _LONGEST_S
    read: bool = True
    data: bool = False


def _message(
    target: Target, path: str, *more: str, method: str = "GET", host: str | None = None
) -> bytes:
    """A request that ends its connection."""
    host = f"127.0.0.1:{target.port}" if host is None else host
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def _path(chance: random.Random) -> str:
    return chance.choice(
        ["/api/site", "/api/overview", "/api/layers?count=500", "/api/texts",
         "/api/activation?row=0",
         "/api/tile?row=0&top=0&left=0&height=8&width=8", "/api/search?q=the", "/api/nothing"]
    )  # fmt: skip


def _no_token(chance: random.Random, target: Target) -> Request:
    return Request([_message(target, _path(chance))])


def _wrong_token(chance: random.Random, target: Target) -> Request:
    token, path = target.token, _path(chance)
    header = chance.choice(
        [
            f"X-Strap-Token: {token[:-1]}",
            f"X-Strap-Token: {token.swapcase()}",
            f"X-Strap-Token: {token}\xff",
            "X-Strap-Token:",
            f"X-Strap-Token: {token}, {token}",
            f"X-Strap-Token: {token}\r\nX-Strap-Token: wrong",
            f"X-Strap-Token : {token}",
            f"X_Strap_Token: {token}",
            f"Cookie: X-Strap-Token={token}; token={token}",
            f"Authorization: Bearer {token}",
            f"Referer: http://127.0.0.1:{target.port}/?token={token}",
        ]
    )
    return Request([_message(target, path, header)])


def _token_in_query(chance: random.Random, target: Target) -> Request:
    sign = "&" if "?" in (path := _path(chance)) else "?"
    name = chance.choice(["token", "x-strap-token", "X-Strap-Token"])
    return Request([_message(target, f"{path}{sign}{name}={target.token}")])


def _huge_cookie(chance: random.Random, target: Target) -> Request:
    inside = chance.choice([r"\1", r"\"", ";", "=", "a=", '"'])
    cookie = inside * (chance.choice([1_000, 14_000, 200_000]) // len(inside))
    return Request([_message(target, _path(chance), f'Cookie: a="{cookie}')])


def _huge_header(chance: random.Random, target: Target) -> Request:
    long = f"X-A: {'a' * chance.choice([10_000, 60_000, 1_000_000])}"
    many = [f"X-{number}: {number}" for number in range(chance.choice([100, 900, 20_000]))]
    return Request([_message(target, _path(chance), *chance.choice([[long], many]))])


def _huge_query(chance: random.Random, target: Target) -> Request:
    one = chance.choice(["token=a&", "token=%41&", "&", "a=1;", "token", "%", "=", "%00"])
    query = one * (chance.choice([900, 14_000, 64_000]) // len(one))
    return Request(
        [_message(target, chance.choice(["/?", "/static/app.js?", "/api/site?"]) + query)]
    )


def _bad_method(chance: random.Random, target: Target) -> Request:
    method = chance.choice(
        ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "CONNECT", "PRI", "get",
         "G" * 5000, "GET\t", "\x00GET"]
    )  # fmt: skip
    return Request([_message(target, _path(chance), _key(target), method=method)])


def _bad_path(chance: random.Random, target: Target) -> Request:
    """Traversal, with the right token."""
    up = chance.choice(
        ["../", "..%2f", "%2e%2e/", "..%5c", "%252e%252e/", "....//", "..;/", "%c0%ae/"]
    )
    start = chance.choice(["/", "/static/", "/api/", "//", "/static/app.js/", "/static/%00"])
    end = chance.choice(["etc/passwd", "_app.py", "proc/self/environ", "app.js%00.html"])
    path = start + up * chance.randrange(1, 12) + end
    return Request([_message(target, path, _key(target))])


def _bad_host(chance: random.Random, target: Target) -> Request:
    """The right token, for another host."""
    port, path = target.port, _path(chance)
    host = chance.choice(
        ["example.com", f"example.com:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", "",
         f"[::1]:{port}",
         f"127.0.0.1:{port}.example.com", f"127.0.0.1:{port}@example.com", f"127.0.0.1:{port} ,a",
         f"127.0.0.1:{port}\r\nHost: example.com", f"0.0.0.0:{port}", "a" * 8000]
    )  # fmt: skip
    return Request([_message(target, path, _key(target), host=host)])


def _other_site(chance: random.Random, target: Target) -> Request:
    """As a browser sends it for a page of another site: without the token."""
    return Request(
        [
            _message(
                target, _path(chance),
                f"Origin: {chance.choice(['https://example.com', 'null', 'http://127.0.0.1:1'])}",
                f"Sec-Fetch-Site: {chance.choice(['cross-site', 'same-site', 'same-origin'])}",
                f"Sec-Fetch-Mode: {chance.choice(['no-cors', 'cors', 'navigate', 'websocket'])}",
                chance.choice(["X-A: b", "Upgrade: websocket\r\nConnection: Upgrade",
                               "X-Forwarded-For: 127.0.0.1\r\nX-Forwarded-Host: 127.0.0.1",
                               "X-Original-URL: /\r\nX-HTTP-Method-Override: GET"]),
            )
        ]
    )  # fmt: skip


def _half_sent(chance: random.Random, target: Target) -> Request:
    whole = _message(target, _path(chance), _key(target))
    half = whole[: chance.randrange(1, len(whole) - 1)]
    return Request([half], hold_s=chance.choice([0, 0.1, 0.5, 2]))


def _slow(chance: random.Random, target: Target) -> Request:
    whole = _message(target, _path(chance))
    return Request([whole[at : at + 8] for at in range(0, len(whole), 8)], pause_s=0.02)


def _garbage(chance: random.Random, target: Target) -> Request:
    return Request(
        [
            chance.choice(
                [
                    chance.randbytes(chance.randrange(1, 5000)),
                    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500),
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                    b"\r\n" * 2000,
                    b"\0" * 100_000,
                    b"GET /\r\n",
                    b"GET /api/site HTTP/9.9\r\n\r\n",
                    b"GET " + "/é ".encode() + b" HTTP/1.1\r\n\r\n",
                ]
            )
        ],
        hold_s=0.5,
    )  # fmt: skip


def _pipelined(chance: random.Random, target: Target) -> Request:
    one = f"GET {_path(chance)} HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\n\r\n".encode()
    last = chance.choice([_message(target, "/"), b"garbage\r\n\r\n", b""])
    return Request([one * chance.randrange(2, 100) + last], hold_s=0.5)


def _unread(chance: random.Random, target: Target) -> Request:
    """Files without end that the client does not read."""
    one = f"GET /static/heatmap.js HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\n\r\n".encode()
    return Request([one * 1000], hold_s=0.5, read=False)


def _false_length(chance: random.Random, target: Target) -> Request:
    """A body that is shorter or longer than it says, or broken, after an answer that needs none."""
    said, body = chance.choice(
        [
            ("Content-Length: 5", b"123456789"),
            ("Content-Length: 99999999999", b"x" * 100_000),
            ("Content-Length: -1", b""),
            ("Content-Length: 1\r\nContent-Length: 2", b"12"),
            ("Content-Length: 9" + "9" * 5000, b""),
            ("Transfer-Encoding: chunked", b"zz\r\n\r\n"),
            ("Transfer-Encoding: chunked", b"1\r\na\r\nffffffffffffffffff\r\n"),
            (
                "Transfer-Encoding: chunked\r\nContent-Length: 3",
                b"0\r\n\r\nGET /api/site HTTP/1.1\r\n\r\n",
            ),
        ]
    )
    method = chance.choice(["GET", "POST"])
    lines = f"{method} {_path(chance)} HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\n{said}\r\n\r\n"
    return Request([lines.encode(), body], pause_s=chance.choice([0, 0.02]), hold_s=0.5)


def _hostile_query(chance: random.Random, target: Target) -> Request:
    """The right token, and values that make no sense or much work."""
    bad = ["NaN", "-1", "1e309", "inf", "9" * 400, "999999999999999", "0", "1125899906842624", "٣",
           "%00", "*" * 900, "", "[" * 900, "0x10", "2048", "7," * 499 + "7"]  # fmt: skip
    name, keys = chance.choice(
        [
            ("layers", ["q", "begin", "count"]),
            ("activations", ["layer", "step", "begin", "count"]),
            ("activation", ["row", "fold"]),
            ("tile", ["row", "fold", "lead", "top", "left", "height", "width", "rows", "columns"]),
            ("value", ["row", "at"]),
            ("text", ["sequence", "layers", "begin", "count", "step", "position"]),
            ("norms", ["sequence", "layers", "first", "many", "begin", "count"]),
            ("vectors", ["sequence", "layers", "first", "many", "at", "columns"]),
            ("search", ["q", "begin", "count"]),
            ("feature", ["feature"]),
        ]
    )
    good = {"row": chance.randrange(300), "sequence": chance.randrange(9), "q": "7", "at": 0,
            "top": 0, "left": 0, "height": 1, "width": 8, "layer": "encoder.layer.3",
            "rows": 2048, "columns": 2048}  # fmt: skip
    values = {key: str(good.get(key, 0)) for key in keys if key in good}
    values |= {
        key: chance.choice(bad) for key in chance.sample(keys, chance.randrange(len(keys)) // 2 + 1)
    }
    values["kind"] = chance.choice(["id", "label", "text", "NaN"])
    query = "&".join(
        f"{key}={urllib.parse.quote(value, safe='%')}" for key, value in values.items()
    )
    return Request([_message(target, f"/api/{name}?{query}", _key(target))], data=True)


def _key(target: Target) -> str:
    return f"X-Strap-Token: {target.token}"


#: Makes a request of each kind.
KINDS: dict[str, Callable[[random.Random, Target], Request]] = {
    "no token": _no_token, "wrong token": _wrong_token, "token in the query": _token_in_query,
    "huge cookie": _huge_cookie, "huge headers": _huge_header, "huge query": _huge_query,
    "bad method": _bad_method, "bad path": _bad_path, "bad host": _bad_host,
    "other site": _other_site, "half sent": _half_sent, "sent slowly": _slow,
    "garbage": _garbage, "pipelined": _pipelined, "answer not read": _unread,
    "false length": _false_length, "hostile query": _hostile_query,
}  # fmt: skip


class Attack:
    """Sends hostile requests of all kinds, in threads, until all are sent.

    Args:
        target: the server.
        requests: how many.
        connections: how many at once.
        idle: how many connections stay open beside them, and send nothing.
        seed: of the requests.

    Attributes:
        statuses: for each kind, how many answers had each status; "closed": there was none.
        let_in: requests that got what they must not get, with the answer's first bytes.
    """

    def __init__(
        self, target: Target, *, requests: int, connections: int, idle: int = 0, seed: int = 0
    ) -> None:
        chance = random.Random(seed)
        names = list(itertools.islice(itertools.cycle(KINDS), requests))
        chance.shuffle(names)
        self._target = target
        self._waiting = [(name, KINDS[name](chance, target)) for name in names]
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.statuses: dict[str, Counter[str]] = {name: Counter() for name in KINDS}
        self.let_in: list[str] = []
        self._senders = [threading.Thread(target=self._send_all) for _ in range(connections)]
        self._idle = threading.Thread(target=self._stay, args=(idle,))

    @property
    def under_way(self) -> bool:
        return any(sender.is_alive() for sender in self._senders)

    def __enter__(self) -> Attack:
        for thread in (self._idle, *self._senders):
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is not None:
            with self._lock:
                self._waiting.clear()
        for sender in self._senders:
            sender.join()
        self._ended.set()
        self._idle.join()

    def _send_all(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    return
                name, request = self._waiting.pop()
            received = _exchange(self._target, request)
            with self._lock:
                self._note(name, request, received)

    def _note(self, name: str, request: Request, received: bytes) -> None:
        answers = _ANSWER.findall(received)
        self.statuses[name].update(status.decode() for status, _ in answers)
        if not answers:
            self.statuses[name]["closed"] += 1
        for status, headers in answers:
            if status == b"200" and b"content-type: application/" in headers and not request.data:
                self.let_in.append(f"{name}: {request.pieces[0][:200]!r}")
        if self._target.token.encode() in received or b"root:" in received:
            self.let_in.append(f"{name}: {request.pieces[0][:200]!r}")

    def _stay(self, idle: int) -> None:
        """Keeps connections open. It opens those anew that the server ends."""
        held: list[socket.socket] = []
        while not self._ended.wait(0.05):
            for ended in [one for one in held if not _is_open(one)]:
                held.remove(ended)
                ended.close()
            with contextlib.suppress(OSError):
                while len(held) < idle:
                    held.append(_connected(self._target))
        for one in held:
            one.close()


def _connected(target: Target) -> socket.socket:
    return socket.create_connection(("127.0.0.1", target.port), timeout=_LONGEST_S)


def _is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _exchange(target: Target, request: Request) -> bytes:
    """Sends a request. Returns what came back until the connection ended, or `hold_s` passed."""
    received = b""
    with contextlib.suppress(OSError), _connected(target) as connection:
        connection.settimeout(max(request.hold_s, 0.01))
        with contextlib.suppress(OSError):  # the server may end it before it has everything
            for piece in request.pieces:
                connection.sendall(piece)
                time.sleep(request.pause_s)
        if not request.read:
            time.sleep(request.hold_s)
            return b""
        deadline = time.monotonic() + request.hold_s
        while time.monotonic() < deadline and (piece := connection.recv(1 << 16)):
            received += piece
    return received


class Owner:
    """Asks as the page does: with the token, on a connection that is kept, or a new one.

    Attributes:
        times: seconds of each answer.
        failures: what was not answered with 200.
    """

    PATHS = (
        "/", "/static/app.js", "/static/style.css", "/api/site", "/api/overview",
        "/api/layers?count=100", "/api/activations?layer=encoder.layer.3", "/api/activation?row=9",
        "/api/tile?row=9&top=0&left=0&height=1&width=8", "/api/texts", "/api/norms?sequence=1",
    )  # fmt: skip

    def __init__(self, target: Target) -> None:
        self._target = target
        self._connection = self._new()
        self.times: list[float] = []
        self.failures: list[str] = []

    def _new(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._target.port, timeout=60)

    def ask(self) -> None:
        """Opens the page once."""
        for path in self.PATHS:
            begun = time.perf_counter()
            try:
                status = self._get(path)
            except (OSError, http.client.HTTPException) as error:
                status = repr(error)
            self.times.append(time.perf_counter() - begun)
            if status != 200:
                self.failures.append(f"{path}: {status}")

    def _get(self, path: str) -> int:
        for tries in range(2):
            try:
                self._connection.request("GET", path, headers={"X-Strap-Token": self._target.token})
                answer = self._connection.getresponse()
                answer.read()
                return answer.status
            except (ConnectionError, http.client.HTTPException):
                # A browser too opens a connection anew that the server has ended.
                self._connection.close()
                if tries:
                    raise
        raise AssertionError
