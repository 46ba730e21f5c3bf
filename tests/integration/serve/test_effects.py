"""Measured effects: what `strap serve` answers, and its view in Chromium."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import complaints
from llm_instrumentation.errors import InvalidArgumentError
from llm_instrumentation.interventions import Effects, Site
from llm_instrumentation.serve import CaptureServer
from llm_instrumentation.serve import _effects as served
from serve_client import HANG_S, Client, until

ROWS, TOKENS = 4, 6  # the embeddings and three layers of the fixture `measured`, and its tokens
GPT2 = "capture=3&view=effects"
WORDS = ["mary…", "met", "john…", "and", "john…→mary…", "gave"]


def of_kinds(effects: Effects, *kinds: str) -> np.ndarray:
    """The mean effects of nodes of some kinds, in their order."""
    return effects.mean[[at for at, kind in enumerate(effects.kinds) if kind in kinds]]


def made(*sites: tuple[str, Site], values: Any = None, **other: Any) -> Effects:
    """Effects that no model was run for; `values` are [nodes, examples]."""
    values = np.arange(2.0 * len(sites)).reshape(-1, 2) if values is None else np.array(values)
    ends = np.ones(values.shape[1]), np.zeros(values.shape[1])
    names = tuple(name for name, _ in sites)
    return Effects(
        tuple(site for _, site in sites), names, values, *ends, "loss", "made up", "noising", "m",
        **other,
    )  # fmt: skip


@pytest.fixture
def serving(tmp_path: Path) -> Any:
    """Opens effects as the server does."""

    def opened(effects: Effects, tokenizer: Any = None) -> served.EffectMaps:
        return served.EffectMaps(effects.save(tmp_path / "made.parquet"), tokenizer)

    return opened


# ---- answers ----------------------------------------------------------------------------


def test_the_site_says_what_was_measured(client, measured):
    first, second = client.ask("site")["effects"]
    assert first["path"] == str(measured.files[0]) and first["metric"] == "logit difference"
    assert first["kinds"] == ["all", "modules", "layers", "mlp"]
    assert second["kinds"] == ["all", "heads", "mlp"]
    assert (second["nodes"], second["examples"]) == measured.at_all.values.shape
    assert second["clean"] == pytest.approx(measured.at_all.clean.mean())


def test_a_map_has_a_row_for_each_layer_and_a_column_for_each_token(client, measured):
    found = client.ask("effects", kind="layers")
    assert (found["rows"], found["columns"], found["axis"]) == (ROWS - 1, TOKENS, "tokens")
    expected = of_kinds(measured.at_tokens, "layers").reshape(ROWS - 1, TOKENS)
    whole = {"top": 0, "left": 0, "height": ROWS - 1, "width": TOKENS}
    tile = client.ask("effects_tile", kind="layers", **whole)
    assert np.array_equal(tile, expected.astype(np.float32))
    assert found["scale"] == np.abs(expected).max()
    part = client.ask("effects_tile", kind="layers", top=1, left=2, height=2, width=3)
    assert np.array_equal(part, expected[1:3, 2:5].astype(np.float32))
    # A map of several kinds has cells that nothing was measured for.
    every = client.ask("effects")
    assert (every["rows"], every["columns"]) == (ROWS + 3, TOKENS + 1)  # the last one is -1
    tile = client.ask("effects_tile", top=0, left=0, height=ROWS + 3, width=TOKENS + 1)
    assert np.isnan(tile[:ROWS, TOKENS]).all() and np.isnan(tile[ROWS:, :TOKENS]).all()
    assert np.array_equal(tile[ROWS:, TOKENS], of_kinds(measured.at_tokens, "mlp").astype("f4"))


def test_the_largest_effects_come_first(client, measured):
    mean = measured.at_tokens.mean
    order = np.argsort(-np.abs(mean), kind="stable")
    found = client.ask("effects", begin=3, count=4)
    assert found["total"] == len(mean)
    assert [one["name"] for one in found["nodes"]] == [
        measured.at_tokens.nodes[at] for at in order[3:7]
    ]
    assert [one["effect"] for one in found["nodes"]] == mean[order[3:7]].tolist()


def test_a_node_has_its_exact_effect_and_how_sure_it_is(client, measured):
    effects = measured.at_tokens
    at = effects.nodes.index("transformer.h.1@4")
    found = client.ask("effect", kind="layers", row=1, column=4, capture=3)
    values = effects.values[at]
    assert (found["name"], found["layer"], found["position"]) == (
        "transformer.h.1@4", "transformer.h.1", 4,
    )  # fmt: skip
    assert float(found["exact"]) == effects.mean[at]
    assert found["token"] == WORDS[4]
    assert found["std_error"] == pytest.approx(values.std(ddof=1) / len(values) ** 0.5)
    assert found["share"] == pytest.approx(effects.fraction()[at])
    assert sum(found["counts"]) == len(values)
    assert found["captured"] == [{"layer": "transformer.h.1", "lead": None}]
    assert client.ask("effect", kind="layers", row=1, column=4)["captured"] == []  # of MiniLM


def test_intervals_are_those_of_the_effects(serving):
    values = np.random.default_rng(0).normal(1, 0.5, (1, 40))
    effects = made(("m0", Site("m.0.mlp")), values=values)
    _, found = serving(effects).node("", 0, 0)
    expected = effects.intervals()
    assert found["interval"] == [expected.low[0], expected.high[0]]
    assert found["positive"] == (values > 0).sum() > 30
    assert serving(effects).listing("", 0, 1)["remark"] == ""
    few = made(("m0", Site("m.0.mlp")), values=[[3.0, -2.5]])
    _, found = serving(few).node("", 0, 0)
    assert found["interval"] == [-np.inf, np.inf]
    assert "2 examples are few here" in serving(few).listing("", 0, 1)["remark"]
    one = made(("m0", Site("m.0.mlp")), values=[[3.0]])
    _, found = serving(one).node("", 0, 0)
    assert (found["interval"], found["std_error"], found["edges"]) == (None, None, None)


def test_a_head_leads_to_its_attention_weights(client, measured):
    found = client.ask("effects", file=1, kind="heads")
    assert (found["rows"], found["columns"], found["axis"]) == (3, 2, "heads")
    one = client.ask("effect", file=1, kind="heads", row=2, column=1, capture=3)
    assert (one["name"], one["head"]) == ("a2.h1", 1)
    assert one["captured"] == [
        {"layer": "transformer.h.2.attn", "lead": None},
        {"layer": "transformer.h.2.attn[1]", "lead": 1},
    ]
    both = client.ask("effects_tile", file=1, top=0, left=0, height=3, width=3)
    assert np.array_equal(both[:, :2].reshape(-1), of_kinds(measured.at_all, "heads").astype("f4"))
    assert np.array_equal(both[:, 2], of_kinds(measured.at_all, "mlp").astype("f4"))


def test_roles_and_negative_positions_are_columns(serving):
    roles = [(f"m{layer}@{role}", Site(f"m.{layer}.mlp", positions=role))
             for layer in (0, 1) for role in ("subject", "end")]  # fmt: skip
    found = serving(made(*roles, ("m0", Site("m.0.mlp"))))
    assert found.listing("", 0, 1)["axis"] == "roles"
    _, labels = found.tile("", (0, 0, 2, 3), 9, 9)
    assert [label for label, _ in labels["columns"]] == ["subject", "end", "all tokens"]
    ends = [(f"h@{at}", Site("h", positions=at)) for at in (-1, 3, -2, 0)]
    found = serving(made(*ends))
    _, labels = found.tile("", (0, 0, 1, 4), 9, 9)
    assert [label for label, _ in labels["columns"]] == ["0", "3", "-2", "-1"]
    several = ("h positions=(1, 2)", Site("h", positions=(1, 2)))
    _, labels = serving(made(*ends, several)).tile("", (0, 0, 2, 5), 9, 9)
    assert [label for label, _ in labels["rows"]] == ["h", "h positions=(1, 2)"]


class Numbers:
    def decode(self, ids: list[int]) -> str:
        return f"t{ids[0]}"


def test_tokens_come_from_the_file_or_else_from_the_tokenizer(serving):
    sites = [(f"h@{at}", Site("h", positions=at)) for at in range(2)]
    ids = np.array([[5, 6], [5, -1]])
    effects = made(*sites, clean_ids=ids, corrupted_ids=np.array([[5, 7], [5, 7]]))

    def labels(found: served.EffectMaps) -> list[str]:
        return [label for label, _ in found.tile("", (0, 0, 1, 2), 9, 9)[1]["columns"]]

    assert labels(serving(effects, Numbers())) == ["t5", "t6→t7"]
    assert serving(effects, Numbers()).node("", 0, 1)[1]["token"] == "t6→t7"
    assert labels(serving(effects)) == ["0", "1"]
    assert serving(effects).listing("", 0, 1)["axis"] == "positions"


def test_of_several_effects_in_a_pixel_the_largest_is_shown(serving):
    values = np.zeros((30, 2))
    values[[3, 17]] = [[5, 5], [-9, -9]]
    sites = [
        (f"h.{at // 10}@{at % 10}", Site(f"h.{at // 10}", positions=at % 10)) for at in range(30)
    ]
    tile, labels = serving(made(*sites, values=values)).tile("", (0, 0, 3, 10), 3, 2)
    assert tile.tolist() == [[5, 0], [0, -9], [0, 0]]
    assert len(labels["columns"]) == 10


def test_effects_that_are_not_finite_are_counted_and_come_last(serving):
    sites = [(f"h@{at}", Site("h", positions=at)) for at in range(3)]
    found = serving(made(*sites, values=[[np.nan, 1], [1, 2], [np.inf, 1]]))
    listed = found.listing("", 0, 9)
    assert (listed["not_finite"], listed["scale"]) == (2, 1.5)
    assert [one["name"] for one in listed["nodes"]][1:] == ["h@1", "h@0"]
    _, one = found.node("", 0, 0)
    assert (one["not_finite"], one["interval"], one["counts"]) == (1, None, [])


def test_what_no_map_can_show_is_refused(serving, monkeypatch):
    same = [(f"{name}.h0", Site("attn", head=0)) for name in ("one", "two")]
    with pytest.raises(InvalidArgumentError, match=r"made\.parquet: the nodes 'one\.h0' and 'two"):
        serving(made(*same))
    monkeypatch.setattr(served, "_MOST_CELLS", 3)
    apart = [(f"h.{at}@{at}", Site(f"h.{at}", positions=at)) for at in range(2)]
    with pytest.raises(InvalidArgumentError, match="would have 2 rows and 2 columns"):
        serving(made(*apart))


def test_what_is_not_there_is_said(client, folder, measured):
    assert client.ask("effect", row=0, column=TOKENS)[0] == 404
    assert client.ask("effect", row=99, column=0)[0] == 404
    status, said = client.ask("effects", kind="neurons")
    assert status == 400 and "choose one of all, modules, layers, mlp" in said
    status, said = client.ask("effects_tile", top=0, left=0, height=99, width=1)
    assert status == 400 and "the map has 7 and 7" in said
    with CaptureServer([folder / "minilm.stream"]) as running:
        status, said = Client(running).ask("effects")
    assert status == 404 and "--effects FILE" in said


# ---- the view ---------------------------------------------------------------------------


def ready(page: Any) -> None:
    page.wait_for_function(
        "() => document.body.dataset.state === 'ready' "
        "&& !document.querySelector('.heat[data-state=loading]')",
        timeout=HANG_S * 1000,
    )


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        said = complaints(page)
        yield page
        assert said == []


def test_the_view_shows_tokens_legend_and_exact_effects(page, server, measured):
    page.goto(f"{server.url}&{GPT2}&kind=layers")
    ready(page)
    effects = measured.at_tokens
    assert page.locator("h1").inner_text() == "Effects on logit difference"
    assert page.locator(".labelled .heads span").all_inner_texts() == WORDS
    assert page.locator(".names span").all_inner_texts() == [f"transformer.h.{n}" for n in range(3)]
    legend = page.locator(".legend span").all_inner_texts()
    scale = np.abs(of_kinds(effects, "layers")).max()
    assert [float(one) for one in legend[:2]] == pytest.approx([-scale, scale], rel=1e-4)
    assert legend[2] == "effect on logit difference"
    box = page.locator(".heat canvas[tabindex]").bounding_box()
    each = box["width"] / TOKENS
    page.mouse.move(box["x"] + 4.5 * each, box["y"] + 1.5 * each)
    exact = repr(float(effects.mean[effects.nodes.index("transformer.h.1@4")]))
    said = f'transformer.h.1, token "{WORDS[4]}", position 4: {exact} ± '
    until(lambda: page.locator(".said").inner_text().startswith(said))
    assert "standard error of 2 examples" in page.locator(".said").inner_text()


def test_the_colours_of_the_view_are_those_of_the_effects(page, server, measured):
    page.goto(f"{server.url}&{GPT2}&kind=layers")
    ready(page)
    blue_minus_red = page.evaluate(
        """([rows, columns]) => {
          const canvas = document.querySelector(".heat canvas[tabindex]");
          const {width, height} = canvas;
          const {data} = canvas.getContext("2d").getImageData(0, 0, width, height);
          return Array.from({length: rows * columns}, (_, k) => {
            const x = Math.floor(((k % columns) + 0.5) * width / columns);
            const y = Math.floor((Math.floor(k / columns) + 0.5) * height / rows);
            return data[4 * (y * width + x) + 2] - data[4 * (y * width + x)];
          });
        }""",
        [ROWS - 1, TOKENS],
    )
    mean = of_kinds(measured.at_tokens, "layers")
    strong = np.abs(mean) > 0.2 * np.abs(mean).max()
    assert strong.any()
    assert (np.sign(np.array(blue_minus_red)[strong]) == np.sign(mean[strong])).all()


def test_the_view_is_used_by_keys_alone_and_leads_to_the_layer(page, server, measured):
    page.goto(f"{server.url}&{GPT2}")
    ready(page)
    page.get_by_label("Sites").select_option("layers")
    ready(page)
    assert "kind=layers" in page.url
    page.locator(".heat canvas[tabindex]").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):  # the first is at 0, 0
        page.keyboard.press(key)
    page.get_by_role("heading", name="transformer.h.1@1", exact=True).wait_for()
    assert page.locator(".items a[aria-current]").inner_text().startswith("transformer.h.1@1")
    # The list moves the cursor of the map, and arrow keys go on from there.
    page.locator(".items a").nth(0).focus()
    page.keyboard.press("ArrowDown")
    ready(page)
    largest = np.argsort(-np.abs(of_kinds(measured.at_tokens, "layers")), kind="stable")
    row, column = divmod(int(largest[1]), TOKENS)
    page.get_by_role("heading", name=f"transformer.h.{row}@{column}", exact=True).wait_for()
    page.locator(".heat canvas[tabindex]").focus()
    page.keyboard.press("ArrowUp" if row else "ArrowDown")
    page.keyboard.press("Enter")
    moved = f"transformer.h.{row - 1 if row else 1}@{column}"
    page.get_by_role("heading", name=moved, exact=True).wait_for()
    page.reload()  # the address is the state
    ready(page)
    page.get_by_role("heading", name=moved, exact=True).wait_for()
    page.locator(".panel a").nth(0).focus()
    page.keyboard.press("Enter")
    until(lambda: page.locator("h1").inner_text() == moved.partition("@")[0])


def test_a_head_of_the_view_leads_to_its_attention(page, server):
    page.goto(f"{server.url}&{GPT2}")
    ready(page)
    page.get_by_label("File").select_option(label="all.parquet")
    ready(page)
    page.get_by_label("Sites").select_option("heads")
    ready(page)
    page.locator(".items a", has_text="a2.h1").click()
    page.get_by_role("heading", name="a2.h1", exact=True).wait_for()
    page.locator(".panel a", has_text="transformer.h.2.attn[1]").click()
    page.get_by_role("heading", name="Head 1", exact=True).wait_for()
    assert page.locator("h1").inner_text() == "transformer.h.2.attn[1]"


def test_hostile_texts_of_effects_are_text(page, folder, tmp_path):
    bad = '<img src=x onerror="alert(1)">'
    site = Site(bad, positions=0)
    effects = dataclasses.replace(made((f"{bad}@0", site)), metric=bad, method=bad, model=bad)
    effects.save(tmp_path / "bad.parquet")
    with CaptureServer([folder / "minilm.stream"], effects=[tmp_path / "bad.parquet"]) as running:
        page.goto(f"{running.url}&view=effects&row=0&column=0")
        ready(page)
        page.get_by_role("heading", name=f"{bad}@0", exact=True).wait_for()
        assert page.locator("main img").count() == 0


def test_the_tab_is_there_if_effects_were_given(page, folder):
    with CaptureServer([folder / "minilm.stream"]) as running:
        page.goto(running.url)
        ready(page)
        assert page.locator("#views a").all_inner_texts() == [
            "Overview",
            "Tokens",
            "Search",
            "Units",
        ]
