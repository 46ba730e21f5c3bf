"""The units of a layer: what `strap serve` answers, and how it stops."""

from __future__ import annotations

import http.client
import json
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llm_instrumentation import capture_activations
from llm_instrumentation.analysis.neurons import _blocks, layer_units, unit_page
from llm_instrumentation.cli import main
from llm_instrumentation.interventions.unit_writes import written_by
from llm_instrumentation.serve import CaptureServer
from serve_client import HANG_S, LAYER, Client
from small_models import VOCABULARY, build, saved
from torch import nn

NEURONS = f"{LAYER}.intermediate"
BLOCK = 50  # rows


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 50 rows of neurons, so that a scan has several steps."""
    monkeypatch.setattr(_blocks, "_BLOCK_BYTES", BLOCK * 8 * 1536)


@pytest.fixture
def serving(folder, minilm):
    """A server that has kept no answer yet."""
    with CaptureServer([folder / "minilm.stream"], tokenizer=minilm.tokenizer) as running:
        yield Client(running)


def lines(client: Client, name: str, **query: Any) -> http.client.HTTPResponse:
    """An answer that comes line by line."""
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=HANG_S)
    path = f"/api/{name}?{urllib.parse.urlencode(query)}"
    connection.request("GET", path, headers=client.owner)
    return connection.getresponse()


def test_units_are_listed_in_each_order(client, folder):
    found = layer_units(folder / "minilm.stream", NEURONS)
    for order, values in (("maximum", -found.maximum), ("std", -found.std),
                          ("minimum", found.minimum), ("unit", np.arange(1536))):  # fmt: skip
        told = client.ask("units", layer=NEURONS, order=order, begin=3, count=5)
        expected = np.argsort(values, kind="stable")[3:8]
        assert [one["unit"] for one in told["units"]] == expected.tolist()
        assert [one["mean"] for one in told["units"]] == found.mean[expected].tolist()
        assert (told["total"], told["rows"]) == (1536, found.rows)


def test_a_unit_is_that_of_the_library(client, folder, minilm):
    page = unit_page(folder / "minilm.stream", NEURONS, 7, k=12, tokenizer=minilm.tokenizer)
    told = client.ask("unit", layer=NEURONS, unit=7)
    assert told["histogram"] == page.unit.histogram
    assert [vars(one) for one in page.unit.lowest] == told["lowest"]
    assert [vars(one) for one in page.related] == told["related"]
    assert told["promoted"] is None and told["logits_problem"] is None
    fewer = client.ask("unit", layer=NEURONS, unit=7, without="101,102")
    assert fewer["rows"] == told["rows"] - 2 * 24
    assert client.ask("unit", layer=NEURONS, unit=7) == told  # what was kept


def test_what_is_no_unit_is_refused_before_anything_is_read(client):
    for query, status, said in (
        ({"layer": NEURONS, "unit": 1536}, 400, "have 1,536, from 0 on"),
        ({"layer": NEURONS, "unit": "x"}, 400, "give an integer"),
        ({"layer": NEURONS, "unit": 1, "without": "1,-2"}, 400, "give integers, as 7 or 7,11"),
        ({"layer": "none", "unit": 1}, 404, "none"),
        ({"layer": "pooler", "unit": 1}, 422, "is not aligned with the tokens"),
    ):
        code, text = client.ask("unit", **query)
        assert code == status and said in text, query
    assert client.ask("units", layer=NEURONS, order="size")[0] == 400


def test_progress_comes_line_by_line_and_then_the_answer(serving, small_blocks):
    told = [json.loads(line) for line in lines(serving, "units", layer=NEURONS).read().splitlines()]
    rows = told[-1]["found"]["rows"]
    assert [one["done"] for one in told[:-1]] == [*range(0, rows, BLOCK), rows]
    assert {one["of"] for one in told[:-1]} == {rows}
    again = lines(serving, "units", layer=NEURONS)  # what was kept is there at once
    assert again.getheader("content-type") == "application/json"
    assert json.loads(again.read()) == told[-1]["found"]


def test_a_request_that_is_given_up_stops(serving, small_blocks, monkeypatch):
    """The first scan would never end by itself, and the second one waits until it has ended."""
    scans, failed = iter(("endless", "usual")), threading.Event()

    def blocks(rows: Any, told: Any) -> Any:
        endless = next(scans) == "endless"
        while endless and not failed.is_set():
            yield next(_blocks.vector_blocks(rows, told))
        yield from _blocks.vector_blocks(rows, told)

    monkeypatch.setattr("llm_instrumentation.analysis.neurons.scans.vector_blocks", blocks)
    answer = lines(serving, "units", layer=NEURONS)
    assert [json.loads(answer.readline())["done"] for _ in range(4)] == [0, *[BLOCK] * 3]
    found: list[Any] = []
    other = threading.Thread(
        target=lambda: found.append(serving.ask("unit", layer=NEURONS, unit=3))
    )
    other.start()
    answer.close()  # the client goes
    other.join(HANG_S)
    failed.set()
    assert found[0]["unit"] == 3


def test_other_requests_are_answered_between_two_blocks(serving, small_blocks, monkeypatch):
    """The scan goes on until the other request is answered."""
    answered, deadline = threading.Event(), time.monotonic() + HANG_S / 2

    def blocks(rows: Any, told: Any) -> Any:
        while not answered.is_set() and time.monotonic() < deadline:
            yield next(_blocks.vector_blocks(rows, told))

    monkeypatch.setattr("llm_instrumentation.analysis.neurons.scans.vector_blocks", blocks)
    answer = lines(serving, "units", layer=NEURONS)
    assert json.loads(answer.readline())["done"] == 0
    assert serving.ask("layers", count=1)["total"] > 1
    answered.set()
    assert b"found" in answer.read().splitlines()[-1]
    assert time.monotonic() < deadline


def test_damage_behind_the_first_block_ends_the_lines(serving, small_blocks, monkeypatch):
    from llm_instrumentation.errors import CorruptError

    def damaged(rows: Any, told: Any) -> Any:
        yield from [*_blocks.vector_blocks(rows, told)][:1]
        raise CorruptError("the second block is damaged")

    monkeypatch.setattr("llm_instrumentation.analysis.neurons.scans.vector_blocks", damaged)
    found = serving.ask("units", layer=NEURONS)
    assert found == {"error": "the second block is damaged"}
    monkeypatch.undo()
    assert serving.ask("units", layer=NEURONS)["total"] == 1536  # the next one has its turn


ACT = "transformer.h.1.mlp.act"


@pytest.fixture
def decoder(tmp_path) -> tuple[nn.Module, Path]:
    """A GPT-2 and its capture."""
    model, stream = build("gpt2"), tmp_path / "run.stream"
    with torch.no_grad(), capture_activations(model, stream):
        model(torch.arange(18).reshape(2, 9) % VOCABULARY)
    return model, stream


def test_the_logits_of_a_unit_are_those_that_it_writes(decoder):
    model, stream = decoder
    writes = model.transformer.h[1].mlp.c_proj
    one = unit_page(stream, ACT, 3, unembedding=model, writes=writes).unit
    asked: list[str] = []

    def of(layer: str) -> nn.Module | None:
        asked.append(layer)
        return written_by(model, layer)

    with CaptureServer([stream], model=model, writes=of) as running:
        client = Client(running)
        told = client.ask("unit", layer=ACT, unit=3)
        assert [vars(effect) for effect in one.promoted or []] == told["promoted"]
        client.ask("unit", layer=ACT, unit=4)
        assert asked == [ACT]  # the model runs once for a layer
        for unit in (3, 4):
            unknown = client.ask("unit", layer="transformer.h.1.mlp.c_fc", unit=unit)
            assert unknown["promoted"] is None
            assert "how the units of 'transformer.h.1.mlp.c_fc' write" in unknown["logits_problem"]
        assert asked == [ACT, "transformer.h.1.mlp.c_fc"]


def test_the_command_takes_logits_and_tokenizer_of_a_model(decoder, tmp_path, monkeypatch):
    model, stream = decoder
    writes = model.transformer.h[1].mlp.c_proj
    one = unit_page(stream, ACT, 3, unembedding=model, writes=writes).unit
    asked: list[Any] = []

    def served(self: CaptureServer) -> None:
        """Serves one request, in place of those until Ctrl-C."""
        with self:
            asked.append(Client(self).ask("unit", layer=ACT, unit=3))

    monkeypatch.setattr(CaptureServer, "run", served)
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(stream), "--model", str(saved(model, tmp_path / "lm"))])
    assert not ended.value.code
    (told,) = asked
    assert [effect["token_id"] for effect in told["promoted"]] == [
        effect.token_id for effect in one.promoted or []
    ]
    assert all(effect["text"] == f"w{effect['token_id']}" for effect in told["suppressed"])
    first = told["contexts"][0]
    assert first["texts"] == [f"w{number}" for number in first["token_ids"]]
