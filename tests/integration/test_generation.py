"""In a generation, each packet has the step and the token that it belongs to."""

from __future__ import annotations

import json

import pytest
import torch
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    InstrumentationFramework,
    analyze_activations_with_tokens,
)

NEW = 6


class Words:
    """The part of a tokenizer that a streamer needs."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(f"<{token_id}>" for token_id in token_ids)


def instrumented(model) -> InstrumentationFramework:
    framework = InstrumentationFramework(InstrumentationConfig.balanced())
    framework.instrument_model(model)
    return framework


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("search", ["greedy", "sampling"])
def test_generate_with_a_streamer(search, rows, llama, ids, path, watching, assert_captured):
    """A capture of generate() has each output and each token, in all ways of searching."""
    prompt = ids[:1].repeat(rows, 1) + torch.arange(rows)[:, None]
    options = {"max_new_tokens": NEW, "do_sample": search == "sampling"}
    torch.manual_seed(5)
    alone = llama.generate(prompt, **options)

    framework = instrumented(llama)
    torch.manual_seed(5)
    with watching(llama) as seen:
        with framework.capture_activations(path, track_per_token=True) as tracker:
            generated = llama.generate(prompt, streamer=tracker.streamer(Words()), **options)
    assert torch.equal(generated, alone)
    assert_captured(path, seen)

    new = generated[:, prompt.shape[1] :].tolist()
    expected = [
        {"token_index": step, "token_id": new[row][step], "token_text": f"<{new[row][step]}>"}
        | ({"row": row} if rows > 1 else {})
        for step in range(NEW)
        for row in range(rows)
    ]
    assert tracker.tokens == expected
    assert tracker.count == NEW

    with ActivationReader(path) as reader:
        # Each forward call is a step, and yields the token of the same number.
        assert reader.steps == reader.tokens == tuple(range(NEW))
        assert all(a.step == a.token for a in reader)
        assert [a.shape[:2] for a in reader["model.norm"]] == [(rows, 9)] + [(rows, 1)] * (NEW - 1)
        for activation in reader["['logits']"] if search == "greedy" else ():
            chosen = activation.to_torch()[:, -1].argmax(-1).tolist()
            assert chosen == [row[activation.token] for row in new]
        assert reader.token_metadata["tokens"] == expected
    assert framework.stats().steps == NEW


def test_the_token_file_has_both_names(llama, ids, path):
    framework = instrumented(llama)
    with framework.capture_activations(path, track_per_token=True) as tracker:
        llama.generate(ids[:1], max_new_tokens=NEW, streamer=tracker.streamer(Words()))
    documented = path.with_name("run.stream_tokens.json")
    older = path.with_name("run_tokens.json")
    content = json.loads(documented.read_text())
    assert json.loads(older.read_text()) == content
    assert content.keys() == {
        "total_tokens", "tokens", "capture_duration_seconds", "stream_bytes", "capture_id",
    }  # fmt: skip
    assert content["total_tokens"] == NEW
    assert content["tokens"] == tracker.tokens
    assert content["capture_duration_seconds"] > 0
    assert sorted(file.name for file in path.parent.iterdir()) == [
        "run.stream", "run.stream.calls", "run.stream.index", "run.stream_tokens.json",
        "run_tokens.json",
    ]  # fmt: skip

    for removed, left in ((documented, older), (older, documented)):
        text = left.read_text()
        removed.unlink(missing_ok=True)
        left.write_text(text)
        analysis = analyze_activations_with_tokens(path, framework)
        assert analysis["token_metadata"] == content
        removed.write_text(text)


def test_packets_and_bytes_per_token(llama, ids, path):
    """The analysis divides packets and stored bytes by the number of tokens."""
    framework = instrumented(llama)
    with framework.capture_activations(path, track_per_token=True) as tracker:
        llama.generate(ids[:1], max_new_tokens=NEW, streamer=tracker.streamer())
    assert {token["token_text"] for token in tracker.tokens} == {""}  # no tokenizer, no texts

    analysis = analyze_activations_with_tokens(str(path), framework)
    stats = framework.stats()
    assert analysis["packets"] == stats.packets
    assert analysis["total_compressed_bytes"] == stats.stored_bytes
    assert analysis["packets_per_token"] == stats.packets / NEW
    assert analysis["bytes_per_token"] == stats.stored_bytes / NEW
    assert analysis["compression"] == "lz4"
    assert analysis["problem"] == ""
    assert analysis["per_layer"]["lm_head"]["count"] == NEW
    layers = analysis["per_layer"].values()
    assert sum(layer["count"] for layer in layers) == stats.packets
    assert sum(layer["bytes"] for layer in layers) == stats.stored_bytes


def test_without_tokens_there_are_no_numbers_per_token(llama, ids, path):
    framework = instrumented(llama)
    with framework.capture_activations(path) as tracker:
        llama.generate(ids[:1], max_new_tokens=2)
    assert tracker is None
    analysis = analyze_activations_with_tokens(path, framework)
    assert analysis.keys().isdisjoint({"token_metadata", "packets_per_token", "bytes_per_token"})

    with framework.capture_activations(path, track_per_token=True):
        llama(ids)
    analysis = analyze_activations_with_tokens(path, framework)
    assert analysis["token_metadata"]["total_tokens"] == 0
    assert "packets_per_token" not in analysis


def test_a_loop_of_ones_own(llama, ids, path):
    """The documented loop runs the whole sequence again for each token, without a cache."""
    framework = instrumented(llama)
    sequence = ids[:1]
    with framework.capture_activations(path, track_per_token=True) as tracker:
        for _ in range(NEW):
            with torch.no_grad():
                output = llama(sequence)
                token = output.logits[:, -1, :].argmax(dim=-1, keepdim=True)
            tracker.record_token(token[0].item(), Words().decode(token[0].tolist()))
            sequence = torch.cat([sequence, token], dim=-1)
    assert [token["token_id"] for token in tracker.tokens] == sequence[0, 9:].tolist()
    with ActivationReader(path) as reader:
        assert [(a.step, a.token) for a in reader["lm_head"]] == [(n, n) for n in range(NEW)]
        assert [a.shape[1] for a in reader["lm_head"]] == list(range(9, 9 + NEW))
        assert len(reader["model.layers.1"].cat(dim=1)[0]) == sum(range(9, 9 + NEW))


def test_several_generations_in_one_capture(llama, ids, path):
    """Tokens and steps count on from one generation to the next."""
    framework = instrumented(llama)
    with framework.capture_activations(path, track_per_token=True) as tracker:
        streamer = tracker.streamer()
        for _ in range(2):
            llama.generate(ids[:1], max_new_tokens=3, do_sample=False, streamer=streamer)
    assert [token["token_index"] for token in tracker.tokens] == [0, 1, 2, 3, 4, 5]
    with ActivationReader(path) as reader:
        assert reader.steps == reader.tokens == (0, 1, 2, 3, 4, 5)
        logits = reader["['logits']"]
        assert torch.equal(logits.at(token=0).to_torch(), logits.at(token=3).to_torch())


def test_steps_without_a_token(llama, ids, path):
    """Forward calls and tokens need not alternate, as when a draft gives two tokens at once."""
    framework = instrumented(llama)
    with torch.no_grad(), framework.capture_activations(path, track_per_token=True) as tracker:
        llama(ids)
        llama(ids)
        tracker.record_token(11, "a")
        tracker.record_token(12, "b")
        llama(ids)
    with ActivationReader(path) as reader:
        assert [(a.step, a.token) for a in reader["lm_head"]] == [(0, 0), (1, 0), (2, 2)]


def test_positions_are_taken_as_given(llama, ids, path):
    framework = instrumented(llama)
    with torch.no_grad(), framework.capture_activations(path, track_per_token=True) as tracker:
        llama(ids)
        tracker.record_token(11, "a", position=40)
        tracker.record_token(12, "b")
    assert [token["token_index"] for token in tracker.tokens] == [40, 1]


def test_beam_search_is_refused(llama, ids, path):
    framework = instrumented(llama)
    with pytest.raises(ValueError, match="beam"):
        with framework.capture_activations(path, track_per_token=True) as tracker:
            llama.generate(
                ids[:1], max_new_tokens=3, num_beams=2, streamer=tracker.streamer(Words())
            )
    with framework.capture_activations(path, track_per_token=True) as tracker:
        streamer = tracker.streamer(Words())
        streamer.put(ids[:1])
        with pytest.raises(ValueError, match="set num_beams to 1"):
            streamer.put(torch.tensor([[3], [4]]))
    assert tracker.tokens == []


def test_an_encoder_that_runs_outside_the_root(build, ids, path, watching, assert_captured):
    """generate() calls the encoder of a T5 separately, before it first calls the model."""
    t5 = build("t5")
    framework = instrumented(t5)
    with watching(t5) as seen:
        with framework.capture_activations(path, track_per_token=True) as tracker:
            output = t5.generate(ids[:1], max_new_tokens=NEW, streamer=tracker.streamer())
    assert_captured(path, seen)
    assert [token["token_id"] for token in tracker.tokens] == output[0, 1:].tolist()
    with ActivationReader(path) as reader:
        encoder = [a for a in reader if a.name.startswith("encoder")]
        decoder = [a for a in reader if not a.name.startswith("encoder") and a.name != "shared"]
        assert {(a.step, a.token) for a in encoder} == {(0, 0)}
        assert [(a.step, a.token) for a in reader["['logits']"]] == [(n + 1, n) for n in range(NEW)]
        assert {a.step for a in decoder} == set(range(1, NEW + 1))
    assert framework.stats().steps == NEW + 1
