"""What `strap serve` answers to its page: layers, tensors, tokens, features and hits."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import numpy as np
import prepared
import pytest
import torch
from llm_instrumentation import ActivationReader, capture_activations
from llm_instrumentation._native import DTYPE_CODES, Session
from llm_instrumentation.serve import CaptureServer
from serve_client import LAYER, STEPS, WEIGHTS, Client, until
from torch import Tensor, nn


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
    assert client.ask("overview", capture=4)[0] == 400


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
