"""The pages of `strap serve` in Chromium."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from browser import WIDTHS, complaints, sideways, violations
from llm_instrumentation import (
    ActivationReader,
    InstrumentationConfig,
    annotate,
    capture_activations,
)
from llm_instrumentation._native import DTYPE_CODES, Session
from llm_instrumentation.analysis.neurons import layer_units, unit_page
from llm_instrumentation.serve import CaptureServer
from serve_client import HANG_S, LAYER, WEIGHTS, until
from torch import nn

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
    "layers of units": "view=units",
    "a unit": f"view=units&layer={LAYER}.intermediate&unit=7",
    "no units": "view=units&layer=pooler",
    "effects": "view=effects",
    "an effect": "capture=3&view=effects&kind=layers&row=1&column=4",
    "effects of heads": "capture=3&view=effects&file=1&row=2&column=1",
    "older": "capture=1",
    "an older tensor": "capture=1&view=layer&layer=big&fold=4",
    "no texts": "capture=1&view=tokens",
    "nothing": "view=nothing",
}
REFUSED = {"no texts": 404, "no units": 422}  # of what the page asks for


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
    blue_minus_red = np.array(
        page.evaluate(
            """([rows, columns]) => {
              const canvas = document.querySelector(".heat canvas[tabindex]");
              const {width, height} = canvas;
              const {data} = canvas.getContext("2d").getImageData(0, 0, width, height);
              return Array.from({length: rows * columns}, (_, k) => {
                const x = Math.floor(((k % columns) + 0.5) * width / columns);
                const y = Math.floor((Math.floor(k / columns) + 0.5) * height / rows);
                const at = 4 * (y * width + x);
                return data[at + 2] - data[at];
              });
            }""",
            list(values.shape),
        )
    )
    order = np.argsort(values.reshape(-1))
    few = len(order) // 10
    assert (blue_minus_red[order[:few]] < -10).all()
    assert (blue_minus_red[order[-few:]] > 10).all()


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


def test_the_same_head_of_another_layer_is_a_choice_away(page, server, weights):
    shown(
        page, server, f"capture=2&view=layer&layer={WEIGHTS}&lead=16&top=0&left=0&height=9&width=9"
    )
    choice = page.get_by_label("Go to layer")
    names = [WEIGHTS.replace("3", str(number)) for number in range(6)]
    assert choice.locator("option").all_inner_texts() == names
    choice.select_option(names[5])
    page.get_by_role("heading", name=names[5], exact=True).wait_for()
    ready(page)
    assert page.locator("h2").nth(0).inner_text() == "Head 4"
    with ActivationReader(weights) as reader:
        largest = reader[names[5]][0].to_numpy()[1, 4].max()
    legend = page.locator(".legend span").nth(1).inner_text()
    assert float(legend) == pytest.approx(largest, rel=1e-4)
    assert "height=" not in page.url
    # The step stays.
    shown(page, server, f"view=layer&layer={LAYER}.output")
    page.locator(".items a", has_text="step 2").click()
    ready(page)
    choice.select_option(f"{LAYER[:-1]}1.output")
    page.get_by_role("heading", name=f"{LAYER[:-1]}1.output", exact=True).wait_for()
    ready(page)
    assert page.locator(".items a[aria-current]").inner_text().startswith("step 2")


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


def test_a_unit_is_found_by_its_layer_and_leads_to_others(page, server, folder):
    layer = f"{LAYER}.intermediate"
    found = layer_units(folder / "minilm.stream", layer)
    order = np.argsort(-found.std, kind="stable")
    shown(page, server, "view=units")
    page.locator("input[type=search]").fill(layer)
    page.locator(".items a").get_by_text(layer, exact=True).click()
    page.get_by_label("Order by").select_option("std")
    first = page.locator(f".items a[data-unit='{order[0]}'][aria-current]")
    first.wait_for()
    ready(page)
    assert page.locator(".items a").nth(1).get_attribute("data-unit") == str(order[1])
    one = unit_page(folder / "minilm.stream", layer, int(order[0]))
    assert page.locator(".panel h2").inner_text() == f"Unit {order[0]}"
    assert page.locator(".contexts").nth(0).locator("li").count() == min(12, len(one.unit.contexts))
    peak = page.locator(".contexts strong .shade").nth(0)
    assert float(peak.get_attribute("title")) == pytest.approx(one.unit.maximum, rel=1e-4)
    assert "s9" in peak.get_attribute("class")
    lowest = page.locator(".contexts").nth(1).locator("strong .shade").nth(0)
    assert float(lowest.get_attribute("title")) == pytest.approx(one.unit.minimum, rel=1e-4)
    assert page.locator(".panel .bars rect").count() == 40
    related = one.related[0].unit
    page.locator("a.effect").nth(0).click()
    page.get_by_role("heading", name=f"Unit {related}", exact=True).wait_for()
    assert f"unit={related}" in page.url and "order=std" in page.url
    page.get_by_label("Ids of tokens to leave out").fill("101")  # [CLS]
    page.keyboard.press("Enter")
    page.get_by_role("heading", name=f"Unit {related}", exact=True).wait_for()
    ready(page)
    assert "without=101" in page.url
    until(lambda: page.locator(".panel dd").nth(0).inner_text() == f"{found.rows - 24}")
    page.locator(".contexts a").nth(0).click()
    page.locator(".token").nth(0).wait_for()


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
