"""How `strap serve` starts and ends, and what it says if it cannot start."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import urllib.parse

import prepared
import pytest
from llm_instrumentation import ActivationReader
from llm_instrumentation.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StrapIOError,
)
from llm_instrumentation.serve import CaptureServer
from serve_client import GOLDEN, HANG_S, LAYER, Client, started


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_ended(folder, ending):
    running, url = started(folder / "minilm.stream", GOLDEN / "older-none.packets")
    try:
        parts = urllib.parse.urlsplit(url)
        connection = http.client.HTTPConnection("127.0.0.1", parts.port, timeout=HANG_S)
        connection.request("GET", f"/?{parts.query}")
        assert connection.getresponse().status == 200
        running.send_signal(ending)  # with a connection that is kept alive
        out, err = running.communicate(timeout=HANG_S)
        assert (running.returncode, out, err) == (0, "", "")
    finally:
        running.kill()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["missing.stream"], 5, "missing.stream"),
        (["{golden}/sample.py"], 5, "sample.py"),
        (
            ["{golden}/older-lz4.packets", "--features", "nothing"],
            5,
            "features.parquet nor features.jsonl",
        ),
        (["{golden}/older-lz4.packets", "--effects", "nothing"], 5, "there is no file nothing"),
        (["{golden}/older-lz4.packets", "--effects", "{golden}/older.py"], 2, "holds no effects"),
        (["{golden}/older-lz4.packets", "--tokenizer", "nothing"], 2, "--tokenizer nothing"),
        (["{golden}/older-lz4.packets", "--port", "99999"], 2, "99999"),
        (["{golden}/older.py"], 2, "older.py"),
    ],
)
def test_the_command_says_what_is_wrong(arguments, code, said, tmp_path):
    given = [argument.format(golden=GOLDEN) for argument in arguments]
    done = subprocess.run(
        [*prepared.strap(), "serve", *given], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "COLUMNS": "200"},
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (code, False)
    assert said in done.stderr


def test_a_port_that_is_taken_is_named(server, client, folder):
    with pytest.raises(StrapIOError, match=f"port {client.port}"):
        CaptureServer([folder / "minilm.stream"], port=client.port)
    with pytest.raises(InvalidArgumentError, match="port"):
        CaptureServer([folder / "minilm.stream"], port=-1)
    with pytest.raises(InvalidArgumentError, match="no stream"):
        CaptureServer([])


def test_features_that_are_damaged_are_refused(folder, tmp_path):
    with pytest.raises(NotFoundError, match="strap sae features --out"):
        CaptureServer([folder / "minilm.stream"], features=tmp_path)
    shutil.copytree(folder / "lines", tmp_path / "lines")
    (tmp_path / "lines" / "features.json").write_text("[")
    with pytest.raises(CorruptError, match="features.json"):
        CaptureServer([folder / "minilm.stream"], features=tmp_path / "lines")


def test_a_reader_that_was_given_stays_open(folder):
    with ActivationReader(folder / "minilm.stream") as reader:
        with CaptureServer([reader]) as running:
            assert Client(running).ask("overview")["tensors"] == len(reader)
        assert reader[LAYER][0].to_numpy().size
