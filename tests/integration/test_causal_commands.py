"""`strap circuit` and `strap effects` on a small model that repeats the second word of a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from llm_instrumentation.analysis.causal_graph import load_graph
from llm_instrumentation.cli import main
from llm_instrumentation.interventions import Effects

WORDS = ["[PAD]", "the", "cat", "dog", "sat", "ran", "here", "there", "red", "blue", "far", "near"]
TEXTS = [
    "--clean", "the cat sat", "--corrupted", "the dog sat", "--correct", "cat", "--wrong", "dog",
    "--clean", "the red ran", "--corrupted", "the far ran", "--correct", "red", "--wrong", "far",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model, with its tokenizer."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[PAD]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[PAD]"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    made = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=len(WORDS), n_positions=8, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
            eos_token_id=0,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(made.parameters(), lr=5e-3)
    for _ in range(120):
        ids = torch.randint(1, len(WORDS), (32, 3))
        torch.nn.functional.cross_entropy(made(ids).logits[:, -1], ids[:, 1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    made.save_pretrained(folder)
    return folder


def strap(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.out, said.err


def test_the_edges_that_matter_are_told_and_written(model, tmp_path, capsys):
    out, every = tmp_path / "circuit.html", tmp_path / "all.json"
    code, said, _ = strap(
        capsys, "circuit", model, *TEXTS, "--top-k", 12, "--out", out, "--all", every
    )
    assert code == 0
    first = said.splitlines()[1]
    assert "input->" in first and first.lstrip().startswith("-")  # it makes the difference smaller
    graph = load_graph(every)
    assert f"of {len(graph.edges)} edges. logit difference: " in said
    assert graph.examples == 2 and graph.clean > 0 > graph.corrupted
    assert "circuit alone" in out.read_text()


def test_json_has_the_circuit_with_exact_effects(model, capsys):
    code, said, _ = strap(capsys, "circuit", model, *TEXTS, "--top-k", 6, "--exact", "--json")
    assert code == 0
    record = json.loads(said)
    assert record["metric"] == "logit difference" and "patching" in record["method"]
    assert 0 < len(record["edges"]) <= 6
    assert record["notes"]["edges of the model"] > 6


def test_experts_and_norms_behind_blocks_are_chosen(model, tmp_path, capsys):
    """FlexOlmo has both."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    transformers.FlexOlmoForCausalLM(
        transformers.FlexOlmoConfig(
            vocab_size=len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
            pad_token_id=0, bos_token_id=0, eos_token_id=0,
        )
    ).save_pretrained(tmp_path)  # fmt: skip
    code, said, error = strap(
        capsys, "circuit", tmp_path, *TEXTS, "--tokenizer", model, "--top-k", 400, "--experts",
        "--post-norms", "linear", "--json",
    )  # fmt: skip
    assert code == 0, error
    record = json.loads(said)
    assert {"m0.e0", "m1.e3"} <= {node["id"] for node in record["nodes"]}
    assert "linear" in record["method"] and "post-norm errors" in record["notes"]


@pytest.mark.parametrize("metric", ["cross-entropy", "kl-divergence"])
def test_pairs_of_a_file_and_other_metrics(model, tmp_path, capsys, metric):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(
        '{"clean": "the cat sat", "corrupted": "the dog sat", "correct": "cat"}\n\n'
        '{"clean": "the red ran here", "corrupted": "the far ran here", "correct": "red"}\n'
    )
    code, said, error = strap(
        capsys, "circuit", model, "--pairs", pairs, "--metric", metric, "--json"
    )
    assert (code, error) == (0, "")
    assert json.loads(said)["examples"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--clean", "the cat"], 2, "needs --corrupted"),
        (["--clean", "the", "--corrupted", "the"], 2, "needs --correct"),
        ([*TEXTS, "--wrong", "red"], 2, "--wrong: 3 for 2 clean texts"),
        ([*TEXTS[:3], "the dog", *TEXTS[4:]], 2, "example 0: 'the cat sat' has 3 tokens"),
        ([*TEXTS[:5], "cat dog", *TEXTS[6:]], 2, "the answer 'cat dog' has 2 tokens"),
        ([*TEXTS, "--pairs", "x.jsonl"], 2, "--pairs has all texts: leave out --clean"),
        (["--pairs", "missing.jsonl"], 5, "there is no such file"),
        ([*TEXTS, "--out", "circuit.png"], 2, "the name ends in .html"),
        ([*TEXTS, "--experts"], 2, "GPT2LMHeadModel has no experts"),
        ([*TEXTS, "--all", "all.html"], 2, "the name ends in .json"),
        ([*TEXTS, "--out", "a.html", "--top-k", 301], 2, "shows at most 300 edges"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_before_the_model_runs(model, capsys, arguments, code, said):
    found, _, error = strap(capsys, "circuit", model, *arguments)
    assert (found, said in error) == (code, True), error


def test_a_damaged_file_of_pairs_names_its_line(model, tmp_path, capsys):
    pairs = tmp_path / "pairs.jsonl"
    whole = {"clean": "the cat", "corrupted": "the dog", "correct": "cat", "wrong": "dog"}
    pairs.write_text(json.dumps(whole) + "\n[1]\n")
    code, _, error = strap(capsys, "circuit", model, "--pairs", pairs)
    assert code != 0 and "line 2: it is no object" in error
    pairs.write_text('{"clean": "the cat", "corrupted": "the dog"}\n')
    code, _, error = strap(capsys, "circuit", model, "--pairs", pairs)
    assert code != 0 and "line 1: it has no text 'correct'" in error


def test_edges_at_each_position_are_told_and_drawn(model, tmp_path, capsys):
    out = tmp_path / "circuit.json"
    code, said, _ = strap(
        capsys, "circuit", model, *TEXTS, "--each-position", "--exact", "--top-k", 8, "--out", out
    )  # fmt: skip
    assert code == 0
    circuit = load_graph(out)
    assert all(node.position is not None for node in circuit.nodes)
    # The last of three words is followed by the second one.
    assert any(edge.source == "input@1" and edge.target.endswith("@2") for edge in circuit.edges)
    assert circuit.notes["tokens"] == {"0": "the", "1": "cat…", "2": "sat…"}
    # 20 edges into keys and values have six pairs of positions, 26 others have three.
    assert circuit.notes["edges of the model"] == 20 * 6 + 26 * 3
    assert f"{len(circuit.edges)} of 198 edges" in said


# ---- effects of parts -----------------------------------------------------------------------


def test_the_parts_that_matter_are_told_and_written(model, tmp_path, capsys):
    out, figure = tmp_path / "heads.parquet", tmp_path / "heads.png"
    code, said, error = strap(
        capsys, "effects", model, *TEXTS, "--sites", "heads", "--sites", "mlp", "--out", out,
        "--figure", figure,
    )  # fmt: skip
    assert (code, error) == (0, "")
    stored = Effects.load(out)
    assert stored.nodes == ("a0.h0", "a0.h1", "a1.h0", "a1.h1", "m0", "m1")
    assert (stored.method, stored.direction) == ("activation patching", "denoising")
    assert stored.values.shape == (6, 2)
    largest = stored.nodes[abs(stored.mean).argmax()]
    assert said.splitlines()[1].split()[-1] == largest
    assert "activation patching, denoising. logit difference: " in said
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_effects_at_each_token_by_gradients(model, tmp_path, capsys):
    out = tmp_path / "where.parquet"
    code, said, _ = strap(
        capsys, "effects", model, *TEXTS, "--sites", "layers", "--each-position", "--method",
        "attribution", "--steps", 20, "--direction", "noising", "--out", out, "--json",
    )  # fmt: skip
    assert code == 0
    record = json.loads(said)
    assert "attribution" in record["method"] and "noising" in record["method"]
    nodes = {node["id"]: node["effect"] for node in record["nodes"]}
    assert len(nodes) == 2 * 3
    # Before the second word the texts are the same. At the end most of the difference has arrived.
    assert nodes["transformer.h.1@0"] == pytest.approx(0, abs=1e-5)
    whole = record["corrupted"] - record["clean"]
    assert whole < 0 and 0.5 < nodes["transformer.h.1@2"] / whole < 1.1
    assert Effects.load(out).clean_ids.tolist() == [[1, 2, 4], [1, 8, 5]]


def test_ablation_needs_no_direction(model, capsys):
    code, said, _ = strap(capsys, "effects", model, *TEXTS, "--method", "ablation")
    assert code == 0 and "zero ablation, noising. logit difference: " in said


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--steps", 5], 2, "--steps is for --method attribution, not patching"),
        (["--method", "ablation", "--direction", "noising"], 2, "ablation changes the clean run"),
        (["--out", "heads.json"], 2, "the name ends in .parquet"),
        (["--figure", "heads.txt"], 2, "--figure heads.txt: the name ends in"),
        (["--sites", "experts"], 2, "experts"),
        (["--out", "missing/heads.parquet"], 5, "there is no folder missing"),
        (["--each-position", "--figure", "a.png"], 2, "a map of heads has no positions"),
        (["--sites", "heads", "--sites", "layers", "--figure", "a.png"], 2, "one kind of parts"),
        (["--sites", "mlp", "--each-position", "--clean", "the cat sat here", "--corrupted",
          "the dog sat here", "--correct", "cat", "--wrong", "dog"], 2,
         "the texts have 3 to 4 tokens"),
        (["--sites", "neurons"], 2, "is not one of"),
    ],
)  # fmt: skip
def test_wrong_options_of_effects_are_said_before_the_model_runs(
    model, capsys, arguments, code, said
):
    found, _, error = strap(capsys, "effects", model, *TEXTS, *arguments)
    assert (found, said in error) == (code, True), error
