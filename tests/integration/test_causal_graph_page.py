"""The page of a causal graph, in a browser."""

from __future__ import annotations

import re

import pytest
from browser import WIDTHS, complaints, sideways, violations
from causal_graphs import induction
from llm_instrumentation.analysis.causal_graph import CausalGraph, Edge, Node, save_graph

HOSTILE = "<script>alert(1)</script>&\"'"


@pytest.fixture
def address(tmp_path) -> str:
    graph = induction()
    nodes = [*graph.nodes, Node(HOSTILE, effect=0.5)]
    edges = [*graph.edges, Edge("a0.h1", HOSTILE), *(Edge(HOSTILE, "logits", effect=0.1),)]
    record = {**graph.to_dict(), "nodes": map(vars, nodes), "edges": map(vars, edges)}
    page = save_graph(CausalGraph.from_dict(record), tmp_path / "graph.html")
    assert "<script" not in page.read_text()
    return page.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_screen_and_reader(browser, address, scheme):
    for width in WIDTHS:
        page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
        found = complaints(page)
        page.goto(address)
        assert page.title() == "Effects on log probability in attn-only-2l"
        assert page.locator("svg.causal a").count() == 6
        assert page.locator("svg.causal g.e").count() == 9
        assert (sideways(page), violations(page), found) == (0, [], [])
        page.close()


def test_a_node_shows_its_edges_alone_and_leads_to_them(browser, address):
    page = browser.new_page()
    page.goto(address)

    def dimmed() -> list[str]:
        """The edges that are not in full colour."""
        edges = page.locator("svg.causal g.e").all()
        pale = [e for e in edges if e.evaluate("e => getComputedStyle(e).opacity") != "1"]
        return sorted(e.locator("title").text_content() for e in pale)

    assert dimmed() == []
    node = page.get_by_role("link", name="a0.h3", exact=True)
    node.hover()
    everything = page.locator("svg.causal g.e title").all_text_contents()
    assert dimmed() == sorted(told for told in everything if "a0.h3" not in told)
    page.mouse.move(0, 0)
    node.focus()  # with the keyboard
    page.keyboard.press("Tab")
    focused = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert dimmed() == sorted(told for told in everything if focused not in told)

    told = page.locator(node.get_attribute("href"))
    assert not told.is_visible()
    node.click()
    assert told.is_visible()
    shown = re.sub(r"\s+", " ", told.inner_text())
    assert "input → a0.h3 (v) +1.5 +1.25 to +1.75 0.001" in shown and "→ logits" not in shown
    page.close()
