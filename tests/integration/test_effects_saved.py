"""Effects as files: what is read is what was measured, and files of others are refused."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from damage import damaged
from llm_instrumentation.analysis.files import stored_effects
from llm_instrumentation.errors import (
    CorruptError,
    InvalidArgumentError,
    NotFoundError,
    StrapError,
    StrapIOError,
    UnsupportedError,
)
from llm_instrumentation.interventions import (
    Effects,
    Prompts,
    Site,
    ablation,
    activation_patching,
    logit_difference,
    sites_of,
)
from llm_instrumentation.interventions.nodes import node_kinds
from llm_instrumentation.serve import _effects

ABOUT = b"llm_instrumentation.effects"
TOKENS = 5


def prompts() -> Prompts:
    """Three pairs that differ in the token at position 2, which is the span "name"."""
    clean = torch.randint(1, 97, (3, TOKENS), generator=torch.Generator().manual_seed(0))
    corrupted = clean.clone()
    corrupted[:, 2] = (clean[:, 2] + 7) % 97
    labels = {"correct": torch.arange(3), "wrong": torch.arange(3) + 9}
    return Prompts(
        clean, corrupted, labels, spans={"name": torch.arange(TOKENS).expand(3, -1) == 2}
    )


class Words:
    """A tokenizer whose tokens are numbers in words."""

    def decode(self, ids: list[int]) -> str:
        return f" w{ids[0]}"


@pytest.fixture(scope="module")
def measured() -> Effects:
    from small_models import build

    model = build("gpt2")
    sites = [
        *sites_of(model, "layers", positions=range(TOKENS)),
        *sites_of(model, "attention", positions=-1),
        *sites_of(model, "mlp", positions="name"),
        *sites_of(model, "heads"),
        Site("transformer.h.0.attn", head=1, head_input="k", positions=2),
        Site("transformer.wte", positions=slice(1, None, 2)),
        Site("transformer.h.1.mlp", positions=[[True, False, True, False, False]] * 3),
        Site("transformer.h.1", side="input", calls=0),
    ]
    return activation_patching(model, prompts(), logit_difference(), sites)


@pytest.fixture
def file(measured: Effects, tmp_path: Path) -> Path:
    return measured.save(tmp_path / "effects.parquet", tokenizer=Words())


def same(one: Effects, other: Effects) -> bool:
    """Whether all fields are equal, to the last bit."""
    pairs = [
        (getattr(one, field.name), getattr(other, field.name))
        for field in dataclasses.fields(Effects)
    ]
    return all(
        np.array_equal(a, b, equal_nan=True) if isinstance(a, np.ndarray) else a == b
        for a, b in pairs
    )


# ---- what is read is what was measured --------------------------------------------------


def test_a_file_has_all_of_the_effects(measured, file):
    found = Effects.load(file)
    assert same(found, measured)
    assert found.sites == measured.sites and found.nodes[-2:] == measured.nodes[-2:]
    assert same(Effects.load(found.save(file)), measured)  # the file is replaced


def test_an_ablation_without_token_ids_has_none_in_its_file(build, tmp_path):
    model = build("gpt2")
    found = ablation(model, prompts(), logit_difference(), sites_of(model, "mlp"))
    found = dataclasses.replace(found, clean_ids=None, kinds=())
    again = Effects.load(found.save(tmp_path / "one.parquet"))
    assert same(again, found) and again.corrupted_ids is None and again.kinds == ()


def test_values_that_are_not_finite_stay(measured, tmp_path):
    values = measured.values.copy()
    values[0] = np.nan, np.inf, -np.inf
    odd = dataclasses.replace(measured, values=values, clean=np.array([np.nan, 1.0, 2.0]))
    assert same(Effects.load(odd.save(tmp_path / "odd.parquet")), odd)


def test_any_reader_of_parquet_reads_it(measured, file):
    table = pq.read_table(file)
    assert table["name"].to_pylist() == list(measured.nodes)
    assert np.array_equal(np.array(table["values"].to_pylist()), measured.values)
    assert table["positions"][0].as_py() == "[0]"
    about = json.loads(table.schema.metadata[ABOUT])
    assert about["metric"] == "logit difference" and about["version"] == 1
    first = str(measured.clean_ids[0, 0])
    assert about["texts"][first] == f" w{first}"


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "bert", "t5", "mixtral"])
def test_each_site_has_the_kind_that_it_was_listed_by(build, architecture):
    model = build(architecture)
    for kind in ("layers", "attention", "mlp", "heads"):
        assert {*node_kinds(model, sites_of(model, kind))} == {kind}
    mixed = [Site(sites_of(model, "layers")[0].layer, side="input"), sites_of(model, "modules")[0]]
    assert node_kinds(model, mixed) == ("modules", "modules")


def test_experts_have_their_kind(build):
    model = build("mixtral")
    (kind,) = {*node_kinds(model, sites_of(model, "experts"))}
    assert kind == "experts"


# ---- what is refused --------------------------------------------------------------------


def test_what_no_file_can_hold_is_refused(measured, tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"effects\.json: effects are written as"):
        measured.save(tmp_path / "effects.json")
    twice = dataclasses.replace(measured, nodes=(measured.nodes[0],) * len(measured))
    with pytest.raises(InvalidArgumentError, match=r"'transformer\.h\.0@0' is there twice"):
        twice.save(tmp_path / "effects.parquet")
    with pytest.raises(InvalidArgumentError, match="these have none: leave it out"):
        dataclasses.replace(measured, clean_ids=None).save(
            tmp_path / "effects.parquet", tokenizer=Words()
        )
    with pytest.raises(StrapIOError, match="cannot write to"):
        measured.save(tmp_path / "nowhere" / "effects.parquet")
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_are_refused_by_name(tmp_path):
    path = tmp_path / "other.parquet"
    with pytest.raises(NotFoundError, match=r"there is no file .*other\.parquet"):
        Effects.load(path)
    path.write_text('{"format": "llm_instrumentation.causal_graph"}')
    with pytest.raises(CorruptError, match=r"other\.parquet holds no effects.*of Effects\.save"):
        Effects.load(path)
    pq.write_table(pa.table({"name": ["a"]}), path)
    with pytest.raises(CorruptError, match="its metadata has no 'llm_instrumentation.effects'"):
        Effects.load(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorruptError, match="pipe is no regular file"):
        Effects.load(tmp_path / "pipe")


def changed(file: Path, about: Any = None, **columns: Any) -> Path:
    """Another file, with some entries of its metadata and some columns changed."""
    table = pq.read_table(file)
    told = json.loads(table.schema.metadata[ABOUT])
    told = {**told, **about} if isinstance(about, dict) else told if about is None else about
    for name, values in columns.items():
        at = table.schema.get_field_index(name)
        array = values if isinstance(values, pa.Array) else pa.array(values, table[name].type)
        table = table.set_column(at, name, array)
    path = file.with_name("changed.parquet")
    pq.write_table(table.replace_schema_metadata({ABOUT: json.dumps(told)}), path)
    return path


def test_each_wrong_part_is_named(measured, file):
    many = len(measured)
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        ("no object", [1], {}),
        ("'metric' is no text", {"metric": 7}, {}),
        ("'clean' is no list of numbers", {"clean": ["a", "b", "c"]}, {}),
        ("2 clean and 3 corrupted", {"clean": [1, 2]}, {}),
        ("'clean_ids' has no list of token ids", {"clean_ids": [[1.5] * TOKENS] * 3}, {}),
        ("'corrupted_ids' have different shapes", {"clean_ids": [[1], [2], [3]]}, {}),
        ("is at position 4 of 4 tokens",
         {"clean_ids": [[1] * 4] * 3, "corrupted_ids": [[1] * 4] * 3}, {}),
        ("no direction 'sideways'", {"direction": "sideways"}, {}),
        ("no kind of nodes 'all'", None, {"kind": ["all"] * many}),
        ("is there twice", None, {"name": ["a"] * many}),
        ("'name' is no text", None, {"name": [None] * many}),
        ("lists of 3 numbers", None, {"values": [[1.0]] * many}),
        ("lists of 3 numbers", None, {"values": [[1.0, 2.0, None]] * many}),
        ("no column 'values' of the type list", None, {"values": pa.array([1.0] * many)}),
        ("no column 'head' of the type int64", None, {"head": pa.array(["1"] * many)}),
        ("a node has no site: head = -1", None, {"head": [-1] * many}),
        ("a node has no site: 'step'", None, {"positions": ['{"start": 0, "stop": 1}'] * many}),
    ]  # fmt: skip
    for said, about, columns in wrong:
        path = changed(file, about, **columns)
        with pytest.raises(CorruptError, match=r"changed\.parquet") as caught:
            Effects.load(path)
        assert said in str(caught.value)
    with pytest.raises(UnsupportedError, match="has version 2, this version reads 1"):
        Effects.load(changed(file, {"version": 2}))


@pytest.mark.parametrize("limit", ["_MOST_NODES", "_MOST_VALUES", "_MOST_BYTES", "_MOST_ABOUT"])
def test_a_file_that_claims_too_much_is_not_decoded(file, limit, monkeypatch):
    monkeypatch.setattr(stored_effects, limit, 20)
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    with pytest.raises(UnsupportedError, match=r"effects\.parquet has .*measure fewer sites"):
        Effects.load(file)


@pytest.mark.parametrize("limit", ["_MOST_NODES", "_MOST_VALUES", "_MOST_ABOUT"])
def test_effects_that_would_be_refused_are_not_written(measured, tmp_path, limit, monkeypatch):
    monkeypatch.setattr(stored_effects, limit, 20)
    with pytest.raises(InvalidArgumentError, match="measure fewer sites"):
        measured.save(tmp_path / "effects.parquet")


@pytest.mark.parametrize("part", ["bytes", "about", "positions", "expert"])
def test_damaged_files_are_refused_or_read(file, part):
    """Whatever the damage, the reader and the server answer with an error that names the file."""
    content, table = file.read_bytes(), pq.read_table(file)
    said = []
    for seed in range(40):
        chance = random.Random(seed)
        path = file.with_name("changed.parquet")
        if part == "bytes":
            path.write_bytes(damaged(content, chance))
        elif part == "about":
            about = damaged(table.schema.metadata[ABOUT], chance)
            pq.write_table(table.replace_schema_metadata({ABOUT: about}), path)
        else:
            texts = table[part].to_pylist()
            texts[chance.randrange(len(texts))] = damaged(b"[1, 2]", chance).decode(
                errors="replace"
            )
            changed(file, **{part: texts})
        for read in (Effects.load, lambda path: used(_effects.EffectMaps(path, None))):
            try:
                read(path)
            except StrapError as error:
                said.append(str(error))
    assert len(said) > 25 and all("changed.parquet" in one for one in said)


def used(found: _effects.EffectMaps) -> None:
    """Asks for all that the pages ask for."""
    for kind in found.about["kinds"]:
        some = found.listing(kind, 0, 1)
        found.tile(kind, (0, 0, some["rows"], some["columns"]), 3, 3)
        for one in some["nodes"]:
            found.node(kind, one["row"], one["column"])
