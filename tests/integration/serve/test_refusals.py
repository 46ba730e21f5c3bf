"""`strap serve` refuses bad values, strangers, other hosts, and requests that do not end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import signal
import socket
import threading
import time
from collections import Counter
from typing import Any

import pytest
from hostile import KINDS, Attack, Owner, Target
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from llm_instrumentation.serve import CaptureServer
from llm_instrumentation.serve._guard import Guard
from serve_client import HANG_S, LAYER, Client, started, until
from starlette.responses import PlainTextResponse

# ---- bad values -------------------------------------------------------------------------

_BAD = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(str),
    st.text(max_size=12),
    st.sampled_from(["", "-1", "1e3", "NaN", "0x10", "٣", "1_000", "9" * 5000, "\0", "../..", "*"]),
)
_NAMES = [
    "capture", "row", "begin", "count", "layer", "layers", "q", "kind", "step", "position", "at",
    "sequence", "top", "left", "height", "width", "rows", "columns", "pool", "lead", "fold",
    "first", "many", "order", "feature", "unit", "without", "file", "column",
]  # fmt: skip
_PATHS = [
    "overview", "layers", "activations", "activation", "axes", "tile", "value", "texts", "text",
    "norms", "vectors", "search", "features", "feature", "units", "unit",
    "effects", "effects_tile", "effect",
]  # fmt: skip
_GOOD = {"row": "1", "sequence": "0", "at": "0", "top": "0", "left": "0", "height": "1",
         "width": "1", "layer": LAYER, "q": "7", "feature": "0", "unit": "0",
         "column": "0"}  # fmt: skip


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.sampled_from(_PATHS), st.dictionaries(st.sampled_from(_NAMES), _BAD, max_size=4))
@example("tile", {"height": "0", "width": "0"})
@example("tile", {"height": "999999999999999", "top": "999999999999999"})
@example("activation", {"fold": "16777216"})
@example("search", {"kind": "id", "q": "99999999999"})
def test_bad_values_are_refused_with_a_reason(client, path, given_values):
    found = client.ask(path, **{**_GOOD, **given_values})
    if isinstance(found, tuple):
        status, said = found
        assert 400 <= status < 500, said
        assert said


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"row": "-1"}, "row = '-1': give an integer from 0"),
        ({"row": "NaN"}, "row = 'NaN': give an integer"),
        ({"row": "1e3"}, "row = '1e3'"),
        ({}, "row is missing: give an integer"),
        ({"row": "0", "fold": "x"}, "fold = 'x'"),
    ],
)
def test_a_bad_value_is_named(client, query, said):
    status, message = client.ask("activation", **query)
    assert status == 400 and said in message


# ---- whom it refuses --------------------------------------------------------------------


def test_the_page_is_the_same_for_all_and_sets_no_cookie(client):
    for path in ("/", f"/?view=search&token={client.token}", "/static/app.js"):
        status, headers, content = client.send(path)
        assert status == 200 and "set-cookie" not in headers
        assert client.token.encode() not in content and b"minilm" not in content
    _, headers, content = client.send("/")
    assert "script-src 'self'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert b"<script>" not in content and b"style=" not in content and b"onclick" not in content


def test_nothing_of_a_capture_is_given_without_the_token(client):
    wrong = client.token[:-1] + ("A" if client.token[-1] != "A" else "B")
    for headers in (
        {}, {"X-Strap-Token": wrong}, {"X-Strap-Token": ""}, {"X-Strap-Token": client.token * 2},
        {"Cookie": f"strap-{client.port}={client.token}"}, {"Cookie": f"token={client.token}"},
    ):  # fmt: skip
        for path in ("/api/overview", "/api/nothing", "/api", f"/api/site?token={client.token}"):
            status, _, content = client.send(path, **headers)
            assert status == 403 and b"strap serve has printed" in content
    assert client.send(f"/?token={wrong}")[0] == 403


def test_a_hostile_header_does_not_hold_up_the_owner(client):
    """Cookies of this kind took http.cookies half a minute."""
    hostile = 'a="' + r"\1" * 14_000 + '"'
    began = time.monotonic()
    assert client.send("/api/site", Cookie=hostile)[0] == 403
    assert client.send("/api/site", **client.owner, Cookie=hostile)[0] == 200
    assert time.monotonic() - began < HANG_S / 4


def test_the_usual_port_is_left_out_of_host():
    scope = {"type": "http", "method": "GET", "path": "/api/site", "query_string": b""}
    guards = [Guard(PlainTextResponse("in"), token="t", port=port) for port in (80, 8000)]
    for host in (b"127.0.0.1", b"localhost"):
        headers = {**scope, "headers": [(b"host", host), (b"x-strap-token", b"t")]}
        assert [status_of(guard, headers) for guard in guards] == [200, 403]


def status_of(app: Any, scope: dict[str, Any]) -> int:
    sent: list[dict[str, Any]] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    # The thread of the tests may have the event loop of a browser.
    thread = threading.Thread(target=lambda: asyncio.run(app(scope, None, send)))
    thread.start()
    thread.join()
    return int(sent[0]["status"])


def test_a_request_that_does_not_come_to_an_end_is_ended(server, client, monkeypatch):
    monkeypatch.setattr("llm_instrumentation.serve._server._PATIENCE_S", 0.2)
    host = f"Host: 127.0.0.1:{client.port}\r\nX-Strap-Token: {client.token}\r\n".encode()
    whole = b"GET /api/site HTTP/1.1\r\n" + host + b"\r\n"
    for first in (b"", b"GET /api/site HTTP/1.1\r\nHo", whole + b"GET /api"):
        with socket.create_connection(("127.0.0.1", client.port), timeout=HANG_S) as connection:
            connection.sendall(first)
            answers = b""
            while piece := connection.recv(65536):  # until the server ends it
                answers += piece
        assert answers.count(b"HTTP/1.1 200") == first.count(whole)


def pipelined(client: Client, many: int) -> bytes:
    """Requests for a file of the page, one behind the other."""
    one = f"GET /static/heatmap.js HTTP/1.1\r\nHost: 127.0.0.1:{client.port}\r\n\r\n"
    return one.encode() * many


def test_a_client_that_does_not_read_its_answers_is_ended(server, client, monkeypatch):
    monkeypatch.setattr("llm_instrumentation.serve._server._PATIENCE_S", 0.2)
    with socket.create_connection(("127.0.0.1", client.port), timeout=HANG_S) as connection:
        connection.sendall(pipelined(client, 1000))  # the answers are more than a socket holds

        def ended() -> bool:
            try:
                connection.send(b"G")
            except ConnectionError:
                return True
            return False

        until(ended)


def test_a_client_that_reads_slowly_gets_all_of_its_answers(server, client, monkeypatch):
    monkeypatch.setattr("llm_instrumentation.serve._server._PATIENCE_S", 2)
    with socket.create_connection(("127.0.0.1", client.port), timeout=HANG_S) as connection:
        connection.sendall(pipelined(client, 1000))
        connection.shutdown(socket.SHUT_WR)
        answers, begun = b"", time.monotonic()
        while piece := connection.recv(1 << 19):
            answers += piece
            time.sleep(0.2)
    assert answers.count(b"HTTP/1.1 200") == 1000
    assert time.monotonic() - begun > 2


def test_many_connections_without_the_token_do_not_shut_out_the_owner(server, client):
    kept = http.client.HTTPConnection("127.0.0.1", client.port, timeout=HANG_S)
    with contextlib.ExitStack() as opened:
        opened.callback(kept.close)
        for _ in range(2):
            kept.request("GET", "/api/site", headers=client.owner)
            assert kept.getresponse().read()  # on the same connection, opened before all others
            for _ in range(300):
                address = ("127.0.0.1", client.port)
                opened.enter_context(socket.create_connection(address, timeout=HANG_S))
            assert client.ask("site")["captures"]


def test_hostile_requests_get_nothing_and_the_owner_is_answered(folder):
    running, url = started(folder / "minilm.stream")
    try:
        owner = Owner(Target.of(url))
        with Attack(Target.of(url), requests=12 * len(KINDS), connections=10, idle=300) as attack:
            while attack.under_way:
                owner.ask()
        owner.ask()
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=HANG_S)
    finally:
        running.kill()
    assert (attack.let_in, owner.failures, err) == ([], [], "")
    assert sum(attack.statuses.values(), Counter())["500"] == 0


@pytest.mark.parametrize(
    "host",
    ["example.com", "127.0.0.1", "127.0.0.1:1", "localhost.example.com:{port}", "[::1]:{port}", ""],
)
def test_requests_for_another_host_are_refused(client, host):
    host = host.format(port=client.port)
    for path in ("/api/overview", f"/?token={client.token}"):
        status, headers, content = client.send(path, **client.owner, Host=host)
        assert (status, content) == (403, b"The request is for another host.\n")
        assert "set-cookie" not in headers
    assert client.send("/", **client.owner, Host=f"localhost:{client.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE"])
def test_only_get_is_allowed(client, method):
    status, headers, _ = client.send("/api/overview", method, **client.owner)
    assert (status, headers["allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "path",
    [
        "/static/../../etc/passwd", "/static/..%2f..%2fetc%2fpasswd", "/static/%2e%2e/_app.py",
        "/static/..%5c..%5cetc%5cpasswd", "/static/%252e%252e/_app.py", "/static//etc/passwd",
        "/static/....//etc/passwd", "/static/app.js/../../_app.py", "/static/app.js%00.html",
        "/../../../../etc/passwd", "/static/", "/static", "/static/_app.py", "/etc/passwd",
        "/static/index.html",
    ],
)  # fmt: skip
def test_only_the_files_of_the_page_are_given(client, path):
    status, _, content = client.send(path, **client.owner)
    assert status == 404
    assert b"root:" not in content and b"create_app" not in content


def test_it_listens_on_the_loopback_alone(client):
    others = {
        address[4][0]
        for address in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
        if not address[4][0].startswith("127.")
    }
    for other in others or pytest.skip("this machine has no other address"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, client.port), timeout=5)


def test_nothing_is_written(folder):
    def state() -> dict[str, tuple[int, int]]:
        found = {path.name: path.stat() for path in folder.iterdir()}
        return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}

    before = state()
    with CaptureServer([folder / "minilm.stream"], features=folder / "features") as running:
        for name in _PATHS:
            Client(running).ask(name, **_GOOD, refresh=1)
    assert state() == before
